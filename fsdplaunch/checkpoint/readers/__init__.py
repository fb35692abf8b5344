"""Recognise and read every layout of a checkpoint, without torch."""
