"""The Llama family: its spec, its modules, and nothing of ranks."""
