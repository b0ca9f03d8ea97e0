"""What this machine does: products, memory, operators and collectives, timed on all of its devices at once."""
