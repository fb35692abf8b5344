"""Run the command line: its exit status, and what an error looks like."""

import _thread
import errno
import os
import sys
import threading
from typing import Any

import typer

from fsdplaunch.cli.commands import app, expanded
from fsdplaunch.cli.options import joined_assignments
from fsdplaunch.cli.output import Output
from fsdplaunch.display_text import shortened, text_of
from fsdplaunch.errors import LaunchError, UsageError
from fsdplaunch.features import built_without

_AROUND = "'?)"  # what typer has around a name that it suggests
# What typer raises for a command line; it has no public name for the root of them.
_WrongUsageError: type[Exception] = next(
    base for base in typer.BadParameter.__mro__ if base.__name__ == "ClickException"
)

_WRONG_PATH = (errno.ENAMETOOLONG, errno.ELOOP)
_LONGEST_NAME = 300
_AGAIN_SECONDS = 0.01


def run(argv: list[str]) -> int:
    """Run the command line, without the program's name; return the exit status."""
    sys.unraisablehook = _interrupt_again
    try:
        with joined_assignments():
            status = app(args=expanded(argv), prog_name="fsdplaunch", standalone_mode=False)
    except SystemExit as stop:
        status = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except (KeyboardInterrupt, typer.Abort):
        return 130
    except _WrongUsageError as error:
        return _show(error)
    except BrokenPipeError:
        # The reader of our output has gone (| head): end quietly, and keep Python from complaining at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:
        if os.environ.get("FSDPLAUNCH_TRACEBACK"):
            raise
        return _refuse(error)
    return status if isinstance(status, int) else 0


def _show(error: Any) -> int:
    """Print what typer says of a command line, in the words of our own errors; return its status."""
    if type(error).__name__ == "NoArgsIsHelpError":
        Output().say(error.format_message())
    else:
        message = (
            error.format_message().rstrip(".").replace("got unexpected extra argument(s)", "unexpected argument")
        )
        hint = f"{error.ctx.command_path} -h" if getattr(error, "ctx", None) else None
        for mark in (". Did you mean ", " Did you mean ", " (Possible options: "):
            message, found, near = message.partition(mark)
            hint = f"did you mean {near.partition(',')[0].strip(_AROUND)}?" if found else hint
        Output().error(LaunchError(message[:1].lower() + message[1:], hint=hint))
    return int(error.exit_code)


def _interrupt_again(lost: "sys.UnraisableHookArgs") -> None:
    """Repeat a Ctrl-C that came where Python raises nothing, as in a finalizer: it would be shown, and be lost."""
    if issubclass(lost.exc_type, KeyboardInterrupt):
        # Once this has returned: it is called where Python raises nothing, either.
        again = threading.Timer(_AGAIN_SECONDS, _thread.interrupt_main)
        again.daemon = True
        again.start()
    else:
        sys.__unraisablehook__(lost)


def _refuse(error: Exception) -> int:
    """Print an error, ours, the system's or one that should not be, in one line, and return its status."""
    if isinstance(error, ModuleNotFoundError):
        error = built_without(error) or error
    if isinstance(error, OSError):
        kind = UsageError if error.errno in _WRONG_PATH else LaunchError
        name = shortened(str(error.filename), _LONGEST_NAME)
        is_gone = error.errno == errno.ENOENT and not error.filename and not os.stat(".").st_nlink  # noqa: PTH116
        error = kind(f"{error.strerror}: {name}" if error.filename else str(error))
        if is_gone:
            error = UsageError("the current folder has been removed", hint="change to one that exists (cd)")
    if not isinstance(error, LaunchError):
        hint = "this is a bug in fsdplaunch; FSDPLAUNCH_TRACEBACK=1 shows where"
        error = LaunchError(f"{type(error).__name__}: {shortened(text_of(error))}", hint=hint)
    Output().error(error)
    return error.exit_code
