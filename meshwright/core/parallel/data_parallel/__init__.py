"""Data parallelism: DDP, FSDP2, and the check that replicas are equal."""
