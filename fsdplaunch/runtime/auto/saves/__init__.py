"""Rule 5: rank 0 has the working tree; what a script saves of a sharded model is full tensors, written once."""
