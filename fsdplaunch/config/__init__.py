"""What the YAML may say: one schema, and everything that is generated from it. No torch, no printing."""
