"""Contradictions between keys: one small function per rule. Importing this package registers all of them."""

from fsdplaunch.config.rules import (  # noqa: F401  (they register rules, in this order)
    compute,
    launch_rules,
    leftovers,
    other_version,
    rendezvous,
    sharding,
    xla,
)
