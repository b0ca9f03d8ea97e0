"""Starts a run of reinforcement learning: its prompts, its policy, and the rollout service."""
