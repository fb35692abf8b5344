"""Nodes of backward graphs: which operation they are of, and what they have saved of it."""
