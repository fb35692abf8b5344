"""Each rank's share of the script's data, random numbers and devices."""
