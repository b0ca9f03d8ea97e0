"""What runs inside a rank with the user's code: probes, the recorder, and killed saves."""
