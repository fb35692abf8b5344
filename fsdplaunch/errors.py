"""What a user reads when something cannot be done: one sentence, one hint, one exit code.

Library code raises these and never prints or exits; `fsdplaunch.cli` has the one handler. Standard
library only.
"""

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_MACHINE = 3
EXIT_SAVED = 75
"""Status of a run that was asked to stop and whose workers all ended with 0: start it again to go on."""


class LaunchError(Exception):
    """The root of every error this package raises on purpose.

    Attributes:
        message: What is wrong, with the value, in lower case and without a full stop.
        hint: What to do about it, or None.
        exit_code: The status the command line ends with.
    """

    exit_code = EXIT_FAILED
    located = False
    """Whether each line of the message begins with its own place, as editors and problem matchers read it."""

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message}\nhint: {self.hint}" if self.hint else self.message


class UsageError(LaunchError, ValueError):
    """The command line or a call asks for something that is not possible; a ValueError, as torch raises there."""

    exit_code = EXIT_USAGE


class MachineError(LaunchError):
    """This machine cannot do what the configuration asks for."""

    exit_code = EXIT_MACHINE


class CheckpointError(LaunchError, RuntimeError):
    """A checkpoint cannot be written, read or merged; a RuntimeError, as `load_state_dict` raises there."""


class ShardingError(LaunchError, ValueError):
    """A model cannot be sharded as the configuration says; a ValueError, as torch and accelerate raise there."""


class NeverShardedError(ShardingError):
    """A script ended without having sharded a model."""
