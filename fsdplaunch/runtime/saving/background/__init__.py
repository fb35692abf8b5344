"""Saves that are copied and written while training goes on."""
