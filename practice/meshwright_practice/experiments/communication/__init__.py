"""Experiments on what ranks send to each other, when, and over which links."""
