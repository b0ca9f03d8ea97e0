"""What a run records: the start of an attempt, its prediction, and every step."""
