"""From a process that has everything imported to a warm interpreter, and on to the agents of later launches."""

import importlib
import os
import sys
from collections.abc import Sequence

from fsdplaunch.agent.warm.child import AgentRequest
from fsdplaunch.agent.warm.import_record import ImportRecord
from fsdplaunch.agent.warm.server import WarmServer, can_stay
from fsdplaunch.launch.warm.folder import UnsafeFolderError, folder_path
from fsdplaunch.launch.warm.identity import server_name

AGENT_MODULES = ("fsdplaunch.agent.elastic_agent",)
"""What an agent imports beside what its fork server has."""


class CannotStayError(Exception):
    """This process cannot be forked from later."""


def stay_warm(record: ImportRecord, modules: Sequence[Sequence[str]], seconds: float) -> AgentRequest:
    """Wait for launches in this process until its time is over; returns in agents forked from it only.

    Args:
        record: What was imported so far; the variables of its beginning are those that launches must have.
        modules: What was to be imported before the fork server was forked, and in it.
        seconds: How long to stay after the last run.
    """
    try:
        server = make_server(record, modules, seconds)
    except (OSError, UnsafeFolderError, CannotStayError):
        os._exit(0)  # there is nobody to tell, and nothing is lost
    return server.serve()


def make_server(record: ImportRecord, modules: Sequence[Sequence[str]], seconds: float) -> WarmServer:
    """Listen, and import what is left while the first launch may already wait.

    Raises:
        OSError: It cannot listen.
        UnsafeFolderError: The folder for it is not this user's alone.
        CannotStayError: It cannot be forked from.
    """
    environ = record.environ_before
    name = server_name(sys.executable, modules, environ, folder=record.folder_before)
    about = {"python": sys.executable, "modules": [*modules[0], *modules[1]]}
    server = WarmServer(folder_path(environ), name, record, seconds, about)
    try:
        with record.noting():
            for module in AGENT_MODULES:
                importlib.import_module(module)
        if why_not := "it has threads, or has opened the GPU" if not can_stay() else record.change():
            raise CannotStayError(why_not)
    except BaseException:
        server.close()
        raise
    return server
