"""The steps of optimizers that train shards."""
