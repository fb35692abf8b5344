"""Code that runs inside the workers: bootstrap, plugin, sharding, checkpoints. Imports torch, never the CLI."""
