"""Predicts memory, communication and step time of layouts, and searches for the best one. Torch-free."""
