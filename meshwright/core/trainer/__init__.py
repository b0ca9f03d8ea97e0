"""One optimizer step, and the training loop around it."""
