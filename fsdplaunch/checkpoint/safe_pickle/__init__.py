"""Read a pickle without trusting it: nothing that it names is imported or called."""
