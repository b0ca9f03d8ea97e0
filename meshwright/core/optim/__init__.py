"""Optimizers, one file each, and learning-rate schedules."""
