"""From text to a checked Config: a file, the environment and the command line."""
