"""Other libraries that shard for themselves, and what they need from us to do it on a CPU, too."""
