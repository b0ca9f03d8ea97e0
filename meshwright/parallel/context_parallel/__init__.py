"""Context parallelism: each rank computes a chunk of every sequence."""
