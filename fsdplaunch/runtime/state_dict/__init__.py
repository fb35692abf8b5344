"""State dicts of sharded models and optimizers, full or sharded."""
