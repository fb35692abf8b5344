"""A request from outside to end the run: which signal, since when, and what is to happen next. In the agent."""

import signal
import time
from dataclasses import dataclass

from fsdplaunch.errors import EXIT_SAVED
from fsdplaunch.launch.report.root_cause import WARNINGS

_ECHO_SECONDS = {signal.SIGINT: 0.3}
_ECHO_DEFAULT = 1.0


@dataclass(slots=True)
class StopRequest:
    """State of a request to stop.

    Attributes:
        grace: Seconds the workers get to end by themselves.
        number: The signal that was received, or None.
        since: When, on the monotonic clock.
        insisted: A second signal came: kill.
    """

    grace: float
    number: int | None = None
    since: float = 0.0
    insisted: bool = False

    def request(self, number: int) -> bool:
        """Take note of a signal; return whether it is to be passed on to the workers.

        Schedulers signal every process of a job, so one request may arrive twice, directly and through the
        launcher: a repetition at once is an echo. A later one means impatience, unless the first was a warning.
        """
        now = time.monotonic()
        if self.number == number and now - self.since < _ECHO_SECONDS.get(signal.Signals(number), _ECHO_DEFAULT):
            return False
        if self.number is not None and self.number not in WARNINGS:
            self.insisted = True
            return False
        self.number, self.since = number, now
        return True

    @property
    def is_warning(self) -> bool:
        """Return whether the request only announces an end."""
        return self.number in WARNINGS

    @property
    def is_over(self) -> bool:
        """Return whether the grace has been used up."""
        return self.number is not None and time.monotonic() - self.since > self.grace

    def forget(self) -> None:
        """Forget a warning that the run has outlived."""
        self.number = None


def stop_status(number: int, codes: list[int | None]) -> int | None:
    """Return the launcher's status after a request to stop.

    Args:
        number: The signal that asked for it.
        codes: How the workers ended (-n for signal n); None for one that had not been started or was killed by us.

    Returns:
        The status, or None when a worker ended in a way of its own, which then decides.
    """
    if number == signal.SIGINT:
        return 128 + number
    if codes and all(code == 0 for code in codes):
        return EXIT_SAVED
    if not codes or any(code is None or -code == number for code in codes):
        return 128 + number
    return None
