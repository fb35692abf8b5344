"""What a script may import from `fsdplaunch`, beside saving and loading."""
