"""Merge a sharded checkpoint into one model folder."""
