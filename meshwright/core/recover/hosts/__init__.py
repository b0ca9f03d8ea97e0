"""Several hosts: one supervisor per host, one of which leads the job because it holds the lease. Torch-free."""
