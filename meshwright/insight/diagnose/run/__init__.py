"""Diagnoses a run from its history, one module per class of causes. Torch-free."""
