"""The report of a run: measurements next to predictions. Torch-free."""
