"""The batch and random numbers: shares as under DDP, or the global batch with the model's passes divided."""
