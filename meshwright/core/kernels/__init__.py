"""Triton kernels, each with the torch function that is its oracle and its fallback."""
