"""The failure plane: supervisor, watchdog, lease, incidents. Decides; never opens a device."""
