"""Starts runs of reinforcement learning: prompts, a user's model as a policy, and the rollout service."""
