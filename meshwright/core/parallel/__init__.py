"""How a model is parallelized: one module per axis, applied in the order of parallelize.py."""
