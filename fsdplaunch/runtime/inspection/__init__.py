"""Look into a sharded model: how it is sharded, its parameters, their names."""
