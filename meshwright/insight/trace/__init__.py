"""One merged trace of all ranks, from spans and profiles. Torch-free."""
