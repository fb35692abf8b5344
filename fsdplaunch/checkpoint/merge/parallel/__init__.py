"""A merge by several processes or machines."""
