"""Context parallelism: sequence chunks on each rank, ring attention and all-to-all attention."""
