"""Checkpoints after training: recognise a layout, read its index safely, merge. The fast path needs no torch."""
