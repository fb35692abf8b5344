"""What the wizard needs to tell the user things that are no prompt."""

from typing import Protocol


class UserMessages(Protocol):
    """Where such words go: `fsdplaunch.cli.output.Output`, or a list in a test."""

    def say(self, text: str) -> None:
        """Tell the user something, on stderr."""
