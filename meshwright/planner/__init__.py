"""The control plane: predicts memory, communication and step time of layouts, and searches them. Torch-free."""
