"""Models under the objective of reinforcement learning."""
