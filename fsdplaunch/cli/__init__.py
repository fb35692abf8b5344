"""Talks to people: the only package that prints or exits."""
