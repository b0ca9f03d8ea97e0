"""What a run prints: the console, the header, and progress."""
