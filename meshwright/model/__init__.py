"""What is trained: the decoder, its loss, its initialisation. Knows nothing of ranks."""
