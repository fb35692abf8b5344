"""Layers whose matrices are divided over ranks (tensor parallelism), and sequences (context parallelism)."""
