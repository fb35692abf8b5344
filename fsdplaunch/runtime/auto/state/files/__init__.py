"""What scripts do with files and folders that every rank would do: done once."""
