"""Checks the hosts of a job before its first step: what differs, what is broken, and what is slow."""
