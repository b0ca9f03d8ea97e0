"""Rewards of completions: the function of a task or of a user, and the process that calls it."""
