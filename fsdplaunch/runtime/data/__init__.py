"""Data loaders: each rank's items of the data, and how far it has been read."""
