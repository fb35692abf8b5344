"""Contradictions between keys: one small function per rule. Importing this package registers all of them."""

# ruff: noqa: F401  (they register rules, in this order)
from fsdplaunch.config.rules import nodes, sharding
