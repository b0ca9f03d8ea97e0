"""Devices, links and clusters: known GPUs, cluster files, and this machine as measured."""
