"""An interpreter that has torch and waits for the next launch: where it is, what it is asked. In the launcher."""
