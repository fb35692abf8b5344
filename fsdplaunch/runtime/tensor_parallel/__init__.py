"""Split layers over ranks that compute on the same data, by the model's own plan or one of the configuration."""
