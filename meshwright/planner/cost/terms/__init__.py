"""Terms of the cost model: kernels, layers, activations, host time, expert load, 8-bit recipes, optimizer and head."""
