"""How reading refuses: one exception for bytes that have no place here, and names shown safely in messages."""

COPY_AGAIN = "copy the checkpoint again, or use an older one"
"""What to do about a damaged file; a hint of errors."""


class InvalidFileError(ValueError):
    """The bytes hold something that has no place in this kind of file."""


def short(text: str, limit: int = 80) -> str:
    """Return `text` as a quoted, escaped and bounded piece of an error message."""
    shown = ascii(text if len(text) <= limit else text[:limit] + "...")
    return shown if len(shown) <= 2 * limit else shown[: 2 * limit] + "..."
