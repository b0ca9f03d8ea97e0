"""The Gemma 2 family: its spec, its modules, and nothing of ranks."""
