"""`fsdplaunch tune`, inside a worker: seconds per step, memory, rows and waiting, as the script runs."""
