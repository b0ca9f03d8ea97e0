"""The state of a run as `prove` sees it: recorded in memory, read from checkpoints, compared bit for bit."""
