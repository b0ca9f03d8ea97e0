"""The verbs that look into runs that exist."""
