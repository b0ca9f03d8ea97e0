"""Runs that others published: how their records are read, and what is assumed of what they do not state."""
