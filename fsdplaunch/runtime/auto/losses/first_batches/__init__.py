"""Compare the first losses with those that one process computes of all rows."""
