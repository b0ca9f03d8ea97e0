"""What is printed about findings and rollouts."""
