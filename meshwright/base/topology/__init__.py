"""Ranks and what they own: axes, process groups, pipeline schedules, stage partition, parameter shards. Torch-free."""
