"""The code that a user brings: entry points, the custom model that they make, and the fingerprint of their source."""
