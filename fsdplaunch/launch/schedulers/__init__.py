"""Handing a run to SLURM, to Kubernetes, or to nodes over ssh."""
