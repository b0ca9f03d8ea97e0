"""The contracts of a run as executable checks, and the certificate that records their results."""
