"""Ranks that must do the same: shared errors, and calls that only some of them made."""
