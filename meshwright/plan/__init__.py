"""The control plane, pure arithmetic: what a layout sends and holds. Torch-free."""
