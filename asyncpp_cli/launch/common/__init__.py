"""What starting runs here and on SLURM have in common."""
