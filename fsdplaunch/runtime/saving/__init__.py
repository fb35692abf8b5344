"""Checkpoints of a run: written whole or not at all, and loaded again."""
