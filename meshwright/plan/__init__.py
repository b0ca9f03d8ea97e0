"""The control plane, pure arithmetic: what a layout sends and holds, and how a pipeline is scheduled. Torch-free."""
