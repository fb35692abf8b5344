"""Random numbers: streams that ranks share or have of their own, and draws for the rows of the global batch."""
