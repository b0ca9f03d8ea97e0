"""A preflight on the hosts of a job, by the supervisors that will run it."""
