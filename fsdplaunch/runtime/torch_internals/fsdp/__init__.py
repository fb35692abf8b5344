"""What torch's FSDP keeps behind its units and wrappers, in both versions."""
