"""What is trained, and by which trainer: architecture, batch, precision, trainer profiles."""
