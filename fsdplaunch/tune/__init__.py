"""Measure which configuration is fastest here: candidates, trials, search, result. Never imports torch."""
