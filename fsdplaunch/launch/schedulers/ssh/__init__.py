"""Nodes over ssh: which there are, and the sessions on them."""
