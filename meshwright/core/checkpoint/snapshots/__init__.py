"""Snapshots: copies of the state in the memory of the hosts, every few steps, between published checkpoints."""
