"""The live page of runs: what it shows, as JSON, and the routes that answer its requests. Torch-free."""
