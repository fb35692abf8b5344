"""What a sharded model needs to behave like the one the script wrote."""
