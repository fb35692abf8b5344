"""The remote side of an ssh connection: become `fsdplaunch launch` as the task on the input says.

    python -P -m fsdplaunch.cli.ssh_remote

The first line of the input is the task; each further line may hold a signal to pass on. The input's end, or a long
silence, means that the one who gave the task has gone: nothing here outlives that.
"""

import json
import os
import select
import signal
import sys
import threading
import time
from io import FileIO
from pathlib import Path

from fsdplaunch.files import atomic_file

OWN_PREFIXES = ("FSDPLAUNCH_", "FSDP_", "ACCELERATE_", "PARALLELISM_CONFIG_")
"""Variables that carry configuration: the task's count, not what a login shell sets here."""
KILL_AFTER_SECONDS = 5.0


def main() -> None:
    """Read the task, prepare, and run the launcher in this process."""
    messages = os.fdopen(os.dup(0), "rb", buffering=0)  # what has been read shows in `select`
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)  # workers must not read our messages
    first = messages.readline()
    if not first:
        sys.exit(1)
    task = json.loads(first)
    for name in [name for name in os.environ if name.startswith(OWN_PREFIXES)]:
        del os.environ[name]
    os.environ.update(task["env"])
    from fsdplaunch.launch.schedulers.ssh import READY

    print(READY, file=sys.stderr, flush=True)  # noqa: T201  (read by the local side)
    try:
        os.chdir(task["folder"])
        path = Path(task["config_file"])
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_file(path) as part:  # another node may write the same file
            part.write_text(task["config"], encoding="utf-8")
    except OSError as error:
        print(f"error: {error.strerror}: {error.filename}", file=sys.stderr, flush=True)  # noqa: T201
        sys.exit(3)
    words = (messages, float(task["grace"]), float(task["silence"]))
    threading.Thread(target=obey, args=words, daemon=True).start()
    from fsdplaunch.cli.app import run

    sys.exit(run(task["argv"]))


def obey(messages: FileIO, grace: float, silence: float) -> None:
    """Pass signals on; when the local side has gone, end everything, with its grace.

    A silence of so many seconds says that it has gone, too: a cut line ends no input.
    """
    while select.select([messages], [], [], silence)[0] and (line := messages.readline()):
        number = json.loads(line).get("signal")
        if isinstance(number, int):
            signal_self(number)
    signal_self(signal.SIGTERM)
    time.sleep(grace)
    signal_self(signal.SIGTERM)
    time.sleep(KILL_AFTER_SECONDS)
    signal_self(signal.SIGKILL)


def signal_self(number: int) -> None:
    """Send this process a signal; its agent, and with it the workers, follow."""
    os.kill(os.getpid(), number)


if __name__ == "__main__":
    main()
