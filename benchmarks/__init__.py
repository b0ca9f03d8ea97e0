"""Benchmarks: the cost of Meshwright relative to its peers, measured in the same run on the same machine."""
