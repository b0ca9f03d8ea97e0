"""The DeepSeek-V2 family: its spec, its modules, and nothing of ranks."""
