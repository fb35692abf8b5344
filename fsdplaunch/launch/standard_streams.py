"""Standard streams that were closed before this process began."""

import os


def open_missing_streams() -> None:
    """Give closed standard streams a place, or the next files that are opened take it."""
    for place in range(3):
        try:
            os.fstat(place)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
