"""Step time and memory of a job, and the uncertainty of both."""

from meshwright.planner.cost import traced_costs

__all__ = ["traced_costs"]
"""Registers the costs of traced models."""
