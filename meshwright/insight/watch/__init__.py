"""Shows a run while it trains: the live page on localhost, and the view in the terminal. Torch-free."""
