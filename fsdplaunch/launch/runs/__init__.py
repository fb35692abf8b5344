"""Runs that have been started: which there are, how each is doing, where its output is."""
