"""The Qwen 3 family: its spec, its modules, and nothing of ranks."""
