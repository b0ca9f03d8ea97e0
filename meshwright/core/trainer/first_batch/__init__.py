"""The check of a custom model on its first samples, before the first step."""
