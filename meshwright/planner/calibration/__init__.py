"""Predictions against measurements: of finished runs on this machine, and of published runs."""
