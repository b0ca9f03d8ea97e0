"""Tensor-parallel plans of models that are not built in."""
