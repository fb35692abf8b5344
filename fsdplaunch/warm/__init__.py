"""Interpreters that have torch and wait for the next launch. The rest of the package works without this folder."""
