"""Limits on what a config, or a file that another program wrote, may ask for. Torch-free."""

MAX_GLOBAL_BATCH = 1 << 24
"""Samples per optimizer step: their ids are in memory at the same time."""
