"""What a checkpoint contains, read from its manifest: the format, the manifest, and the list of a run's checkpoints."""
