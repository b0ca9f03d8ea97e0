"""Why a plan is the choice: its ladder, its baselines, its five-part explanation, and what to try if nothing fits."""
