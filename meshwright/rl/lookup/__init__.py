"""The rollouts of a run of reinforcement learning: what its steps recorded, and what became of every rollout."""
