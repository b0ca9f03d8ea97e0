"""Step time and memory of a job, and the uncertainty of both."""
