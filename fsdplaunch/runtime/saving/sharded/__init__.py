"""Sharded files: every rank plans alone what it writes, and rank 0 writes the index of all."""
