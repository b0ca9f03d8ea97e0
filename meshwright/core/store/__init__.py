"""Stores that need other processes: the memory of other hosts, and records that are sent while a run goes on."""
