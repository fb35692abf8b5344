"""`python -m fsdplaunch` and the `fsdplaunch` command.

What stands here, and in the package's own file, imports nothing that is not part of the interpreter: a Ctrl-C
before `main` has taken it over would end in a traceback.
"""

import _signal  # type: ignore[import-not-found]  # what `signal` is made of; that one imports a dozen modules
import sys


def main() -> None:
    """Run the command line and exit with its status; a Ctrl-C before and after that is quiet, too."""
    is_ours = _signal.getsignal(_signal.SIGINT) is _signal.default_int_handler
    if is_ours:  # until a command begins: there is nothing to clear up
        _signal.signal(_signal.SIGINT, _signal.SIG_DFL)
    from fsdplaunch.cli.app import run

    status = run(sys.argv[1:])
    import gc

    gc.freeze()  # what is left is Python's own taking apart, which would look for garbage in all of it
    if is_ours:
        _signal.signal(_signal.SIGINT, _signal.SIG_IGN)
    sys.exit(status)


if __name__ == "__main__":
    main()
