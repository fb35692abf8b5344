"""Facts about this machine, its cluster and a model folder. No torch."""
