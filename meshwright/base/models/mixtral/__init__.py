"""The Mixtral family: its spec, its modules, and nothing of ranks."""
