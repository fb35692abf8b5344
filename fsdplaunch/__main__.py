"""`python -m fsdplaunch` and the `fsdplaunch` command."""

import sys


def main() -> None:
    """Run the command line and exit with its status."""
    from fsdplaunch.cli.app import run

    sys.exit(run(sys.argv[1:]))


if __name__ == "__main__":
    main()
