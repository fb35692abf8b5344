"""What a script's losses are over all ranks, where each has a share of the batch."""
