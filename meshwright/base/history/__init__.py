"""What happened in a run, read from its folder: steps, attempts, checkpoints, goodput, signals. Torch-free."""
