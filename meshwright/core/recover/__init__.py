"""Failure handling: supervisor, watchdog, lease and incidents. This package never opens a device."""
