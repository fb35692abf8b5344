"""Rule 6: rank 0 alone may save, read or evaluate a sharded model; the other ranks hand over their shards."""
