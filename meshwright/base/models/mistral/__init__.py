"""The Mistral family: its spec, its modules, and nothing of ranks."""
