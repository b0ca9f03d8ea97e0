"""Scenario drills: a situation with figures, an answer in five parts, and a check against the planner's figures."""
