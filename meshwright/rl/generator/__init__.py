"""Samples rollouts from a policy, scores them as the learner does, and assembles groups."""
