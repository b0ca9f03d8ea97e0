"""Online reinforcement learning: a durable log of rollouts, generators, rewards, and the learner's objective."""
