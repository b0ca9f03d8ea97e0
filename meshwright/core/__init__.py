"""Contracts for a training loop (stream, checkpoints, supervision, records), and the trainer built from them."""
