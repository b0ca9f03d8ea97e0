"""Cards on where parameters, gradients, optimizer state and ranks are placed."""
