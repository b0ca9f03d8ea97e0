"""The trainer, and the sample stream, checkpoints, supervision and records beneath it."""
