"""Proves a config with the user's own model, whose reference is the module in one plain process."""
