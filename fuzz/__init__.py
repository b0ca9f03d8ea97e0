"""A seeded fuzzer of the whole product: `python -m fuzz` from the repository root."""
