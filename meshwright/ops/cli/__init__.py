"""The verbs of this area: launch and preflight."""
