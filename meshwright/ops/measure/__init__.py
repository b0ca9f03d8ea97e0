"""Measures this machine for the planner: matmuls, memory bandwidth, operator launches and collectives."""
