"""Predictions beside measurements: of finished runs on this machine, and of published runs."""
