"""What a run writes while it runs: step phases, events, heartbeat, communication and memory counters."""
