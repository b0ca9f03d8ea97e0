"""How a model is spread over ranks: one file an axis."""
