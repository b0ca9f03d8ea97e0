"""The operations of a step on one rank, in order: the one list from which time, bytes and memory follow."""
