"""The checks, one module per part of the machine; each is a pure function over the facts."""
