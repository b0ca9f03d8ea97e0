"""The real training step on fake tensors and a fake cluster of any size."""
