"""Reads Kineto traces of any program and finds what limits it. Torch-free."""
