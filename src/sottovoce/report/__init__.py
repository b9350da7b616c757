"""Reports: they read run folders and nothing else."""
