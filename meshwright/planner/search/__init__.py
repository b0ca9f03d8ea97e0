"""Candidates, the search for the best plan, and its explanation."""
