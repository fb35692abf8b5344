"""What is in the way of a run, as data: found on one node before it starts, or between nodes that join."""

from dataclasses import dataclass

from fsdplaunch.errors import MachineError


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that is in the way.

    Attributes:
        message: What is wrong, in one line.
        hint: What to do about it.
        fatal: The run cannot work; otherwise it may, and the user should know.
    """

    message: str
    hint: str
    fatal: bool = True

    @property
    def error(self) -> MachineError:
        """Return it as an error."""
        return MachineError(self.message, hint=self.hint)
