"""The planner's part of a report: the plan of a run, its explanation, and what was predicted."""
