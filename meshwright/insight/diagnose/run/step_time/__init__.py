"""What limits the step time of a run: one module per cause, each with a generator `find`. Torch-free."""
