"""What keeps the activations of blocks small between forward and backward: recomputation and host memory."""
