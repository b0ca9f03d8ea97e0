"""The timed interview: one exercise with gates, checked on the user's own notebook or script, and scenario drills."""
