"""Kubernetes: the objects of a run, kubectl, and how a run is doing there."""
