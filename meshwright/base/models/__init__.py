"""The built-in decoder: modules, loss and initialization. It knows nothing of ranks."""
