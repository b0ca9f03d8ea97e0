"""An independent reference of a whole training run, which shares no code with what it checks."""
