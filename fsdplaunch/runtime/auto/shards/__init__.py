"""Rule 3: outside of passes a shard reads as the full tensor, is written by its full shape, and steps locally."""
