"""Judges what the ranks of a preflight measured, by subject: hosts, devices, network."""
