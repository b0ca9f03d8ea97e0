"""One step, and the loop around it."""
