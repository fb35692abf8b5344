"""What wraps a unit's forward: activation checkpointing, torch.compile, float8, other methods."""
