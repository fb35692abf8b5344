"""Contradictions between keys: one small function per rule."""
