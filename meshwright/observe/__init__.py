"""What people look at: the terminal, and pictures."""
