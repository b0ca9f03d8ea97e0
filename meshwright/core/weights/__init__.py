"""Weights of a model in safetensors folders: reads them shard by shard, and exports checkpoints to them."""
