"""Training speed on one CUDA device, beside the loops that a PyTorch user would run instead."""
