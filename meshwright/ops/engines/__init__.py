"""Files that start one supervisor per host on an existing engine: SLURM, Kubernetes, Ray. Torch-free."""
