"""The plugin object: the fields that scripts for accelerate set, filled from the configuration."""
