"""Generates text from a checkpoint with a key-value cache."""
