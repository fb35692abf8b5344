"""Each rank's share of the script's data, what is told of its rows, and its device."""
