"""Draws pictures on the terminal: one module per kind of picture. Torch-free."""
