"""What a model is trained on: permutation -> stream -> source -> loader, each a pure function of seed and position."""
