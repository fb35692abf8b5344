"""A warm interpreter that no run has left behind: `fsdplaunch warm --start` runs this file.

    python -u .../warm/main.py ABOUT

ABOUT is JSON: `modules`, the two lists of modules; `seconds`, how long to stay; `answer`, an inherited descriptor
to say into, in JSON, how the start went.
"""

import sys

if __name__ == "__main__" and sys.path and sys.path[0].endswith("warm"):
    del sys.path[0]  # this file's folder: its names are not for `import`

import gc
import json
import os
from contextlib import suppress
from typing import Any

from fsdplaunch.agent.fork_server import import_all
from fsdplaunch.agent.forked_process import leave_files, register_last, share_modules
from fsdplaunch.agent.main import run_forked_agent
from fsdplaunch.warm.identity import UnsafeFolderError
from fsdplaunch.warm.import_record import ImportRecord
from fsdplaunch.warm.server import CannotStayError, make_server


def main(about: dict[str, Any]) -> None:
    """Import, say how that went, and wait for launches.

    Args:
        about: See the head of this file.
    """
    register_last()
    modules, answer = about["modules"], int(about["answer"])
    record = ImportRecord()
    gc.disable()
    with record.noting():
        loaded = import_all([*modules[0], *modules[1]], before=record.environ_before)
    share_modules()
    try:
        if loaded.obstacle is not None:
            raise CannotStayError(loaded.obstacle)
        server = make_server(record, modules, float(about["seconds"]))
    except (OSError, UnsafeFolderError, CannotStayError) as error:
        with suppress(BrokenPipeError):
            os.write(answer, json.dumps({"error": str(error)}).encode())
        os._exit(1)
    try:
        os.write(answer, json.dumps({"pid": os.getpid(), "notes": list(loaded.notes)}).encode())
    except BrokenPipeError:  # who wanted it has gone
        server.close()
        os._exit(1)
    leave_files()
    os.close(answer)
    run_forked_agent(server.serve(), record)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
