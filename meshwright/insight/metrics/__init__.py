"""The metrics of a run: one table, served to Prometheus, pushed by OTLP, and shown by Grafana. Torch-free."""
