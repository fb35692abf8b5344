"""Numbers of bytes as every message writes them: in powers of 1024, as GPUs and memory are counted."""

MIB = 1024**2
GIB = 1024**3


def size_words(count: float) -> str:
    """Return a number of bytes as people write it: `13.2 GiB`."""
    for unit in ("bytes", "KiB", "MiB", "GiB", "TiB"):
        if count < 1024 or unit == "TiB":  # noqa: PLR2004
            return f"{count:.0f} bytes" if unit == "bytes" else f"{count:.1f} {unit}"
        count /= 1024
    raise AssertionError(count)
