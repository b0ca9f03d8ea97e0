"""The learner of reinforcement learning: the batches of rollouts, and users' models under the policy objective."""
