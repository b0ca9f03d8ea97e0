"""Output for people: terminal views, the HTML plan page and the run report."""
