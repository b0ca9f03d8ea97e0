"""Durable storage: the `Store` interface and its implementations."""
