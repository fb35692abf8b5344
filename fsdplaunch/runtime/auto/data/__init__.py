"""Each worker's part of the script's data, random numbers and devices."""
