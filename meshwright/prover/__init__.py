"""The contracts as runnable checks, and the certificate of their results."""
