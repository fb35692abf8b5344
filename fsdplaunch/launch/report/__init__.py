"""What became of a run: its result, the first failure, and the lines that say so."""
