"""What accelerate needs from us in a run that shards."""
