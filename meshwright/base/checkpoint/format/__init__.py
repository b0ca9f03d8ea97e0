"""The files that describe a checkpoint: parts, regions and their serialization. Torch-free."""
