"""What is trained, and by which trainer: architecture, batch, precision and trainer profiles."""
