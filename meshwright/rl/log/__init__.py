"""The rollout log: durable, append-only records of rollouts, in files or in an object store."""
