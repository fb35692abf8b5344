"""Which question comes next, and what to suggest. The only package that imports questionary."""
