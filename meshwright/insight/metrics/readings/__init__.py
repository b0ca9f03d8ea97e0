"""The readings of metrics from a snapshot of a run."""
