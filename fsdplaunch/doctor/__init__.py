"""Can this machine train? Facts are read once; each check is a pure function over them."""
