"""The training data: permutation -> stream -> source -> loader. Each is a pure function of seed and position."""
