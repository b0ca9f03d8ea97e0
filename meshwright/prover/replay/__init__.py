"""Runs steps of a run again: one step in detail, and the first step and parameter in which two runs part."""
