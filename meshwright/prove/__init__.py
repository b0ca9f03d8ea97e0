"""The contracts as runnable checks, and the certificate they sign."""
