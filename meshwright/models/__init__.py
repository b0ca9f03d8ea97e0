"""What is trained: the decoder, its loss and its initialisation. Knows nothing of ranks."""
