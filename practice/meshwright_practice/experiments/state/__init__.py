"""Experiments on where parameters, gradients and optimizer state live."""
