"""The `launch` and `runs` commands: which way a run starts, and what is said about it."""
