"""What happened in a run, and why: watch, report, diagnose, metrics and trace. Torch-free."""
