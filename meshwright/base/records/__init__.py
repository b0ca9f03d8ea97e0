"""The records of a run: events, heartbeats, spans, failures and incidents, and the folders that contain them."""
