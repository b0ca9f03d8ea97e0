"""Snapshots in the memory of the hosts of a job: what a host keeps, and the store that ranks see. Torch-free."""
