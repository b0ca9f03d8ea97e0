"""The process that owns the rollouts of a run: it assigns groups to generators, records them, and forms batches."""
