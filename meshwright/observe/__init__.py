"""What people look at: the terminal."""
