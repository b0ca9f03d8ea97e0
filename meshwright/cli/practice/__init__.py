"""The verbs of practice: cards, labs, incidents, the interview and the page."""
