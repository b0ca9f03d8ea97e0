"""The modules that are trained: one per model family, and the layers that they share."""
