"""Bytes communicated and resident on each rank of a Meshwright run, exact to the byte."""
