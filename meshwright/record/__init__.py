"""What a run writes while it runs: the run folder, timed phases, events."""
