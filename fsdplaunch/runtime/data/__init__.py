"""Data loaders: each rank's part of the data, and how far it has been read."""
