"""SLURM: its commands, and the batch script of a run."""
