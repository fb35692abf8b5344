"""An interpreter that has torch and waits for the next launch: the process itself, and what it forks."""
