"""The contract of reinforcement learning: objective, log-probabilities, and rollouts that are trained at most once."""
