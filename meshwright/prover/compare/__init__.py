"""Compares the trace of a run with that of the reference: differences, rounding noise, likely causes."""
