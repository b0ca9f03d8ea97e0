"""The cards, one module per topic, each with a tuple `CARDS`. They are data: nothing here imports torch."""
