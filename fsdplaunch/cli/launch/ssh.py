"""`fsdplaunch launch` on nodes over ssh: one launcher on each, one report here."""

import os
import shlex
import signal
import subprocess
import sys
import zlib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

from fsdplaunch.cli.launch.handoff import Handoff, snapshot
from fsdplaunch.cli.launch.options import LaunchRequest
from fsdplaunch.cli.output import Output
from fsdplaunch.config.schema.config import Config
from fsdplaunch.config.schema.walk import variable_of
from fsdplaunch.config.world_size import node_range
from fsdplaunch.errors import EXIT_MACHINE, MachineError
from fsdplaunch.launch.report.root_cause import shell_status
from fsdplaunch.launch.run_id import GROUP_RUN
from fsdplaunch.launch.runs.registry import write_job
from fsdplaunch.launch.schedulers.ssh.host_conflicts import check_list
from fsdplaunch.launch.schedulers.ssh.hosts import (
    SshHost,
    check_client,
    client_words,
    explain_end,
    network_name,
    read_hosts,
)
from fsdplaunch.launch.schedulers.ssh.sessions import SessionSpec, SshSessions
from fsdplaunch.run_dir import CONFIG

START_SECONDS = 30.0
"""How long a node's login and Python may take to start."""
SILENCES = 3
"""A node ends its part when it has not heard from us for so many times launch.machine_timeout_seconds."""
_FIRST_PORT, _PORTS = 20000, 5000


def launch_over_ssh(request: LaunchRequest, out: Output) -> int:
    """Start a launcher on each node, show node 0's output and the first failure, end together.

    Raises:
        LaunchError: Before anything was started, or when a node could not be started.
    """
    config, options, handoff = request.config, request.options, Handoff(request, out)
    hosts = read_hosts(config.ssh)
    check_list(config, hosts, request.loaded.origins)
    check_client()
    placed = _placed(config, hosts, handoff.run_id)
    python = config.ssh.python or sys.executable
    secrets = handoff.secrets()
    silence, module_path = config.launch.machine_timeout_seconds, os.environ.get("PYTHONPATH")
    sessions = [
        SessionSpec(
            host=host.name,
            words=client_words(host.name, config.ssh, python=python, module_path=module_path, silence=silence),
            task=_task(placed, host, rank, request, handoff.run_id),
            secrets=secrets,
            # Of all nodes that end with a JSON object, node 0's alone is shown.
            output=subprocess.DEVNULL if options.as_json and rank > 0 else None,
        )
        for rank, host in enumerate(hosts)
    ]
    sent = "\n".join(f"{shlex.join(one.words)}\n{_shown(one.task)}" for one in sessions)
    plan = handoff.plan(sessions[0].words, sent=sent, config=placed)
    if handoff.is_only_shown(plan):
        return 0
    handoff.write_folder(plan, {})
    names = [host.name for host in hosts]
    write_job(handoff.run_dir, route="ssh", hosts=names)
    running = SshSessions(
        _printer_of_hosts(hosts, out), needed=node_range(placed)[0], beat_seconds=silence / SILENCES
    )
    out.say(f"fsdplaunch run {handoff.run_id} over ssh on {', '.join(names)}")
    return _run(running, sessions, placed, python, out)


def _placed(config: Config, hosts: list[SshHost], run_id: str) -> Config:
    """Return the configuration with what the list of nodes sets."""
    joins = len(hosts) > 1 and not config.launch.rendezvous_endpoint
    port = config.main_process_port or _FIRST_PORT + 2 * (zlib.crc32(run_id.encode()) % _PORTS)
    slots = any(host.slots for host in hosts)
    return replace(
        config,
        num_machines=len(hosts),
        machine_rank=None,
        num_processes="auto" if slots else config.num_processes,
        main_process_ip=(config.main_process_ip or network_name(hosts[0].name, config.ssh)) if joins else None,
        main_process_port=port if joins else None,
    )


def _task(config: Config, host: SshHost, rank: int, request: LaunchRequest, run_id: str) -> dict[str, Any]:
    """Return what the remote side is to do."""
    file = str(Path(config.launch.log_dir) / run_id / CONFIG)
    env = {GROUP_RUN: f"{run_id}/try0"}
    if config.num_machines > 1:
        env[variable_of("machine_rank")] = str(rank)
    if host.slots:
        env[variable_of("launch.workers_per_node")] = str(host.slots)
    return {
        "argv": request.words([], file, as_json=request.options.as_json),
        "folder": config.ssh.remote_dir or str(Path.cwd()),
        "env": env,
        "config_file": file,
        "config": snapshot(config, log_dir=Path(config.launch.log_dir)),
        "grace": config.launch.shutdown_grace_seconds,
        "silence": SILENCES * config.launch.machine_timeout_seconds,
    }


def _shown(task: Mapping[str, Any]) -> str:
    """Return a task for people: the configuration, which is the same everywhere, by its name only."""
    variables = " ".join(f"{name}={shlex.quote(value)}" for name, value in task["env"].items())
    return f"  cd {shlex.quote(task['folder'])} && {variables} fsdplaunch {shlex.join(task['argv'])}"


def _printer_of_hosts(hosts: list[SshHost], out: Output) -> Any:
    first = hosts[0].name

    def show(host: str, line: str) -> None:
        out.say(line if host == first else f"[{host}] {line}")

    return show


def _run(sessions: SshSessions, parts: list[SessionSpec], config: Config, python: str, out: Output) -> int:
    received: list[int] = []

    def handle(number: int, _frame: FrameType | None) -> None:
        received.append(number)
        sessions.signal(number)

    for name in config.launch.signals:
        if signal.getsignal(getattr(signal, name)) is not signal.SIG_IGN:
            signal.signal(getattr(signal, name), handle)
    grace = config.launch.shutdown_grace_seconds
    try:
        for part in parts:
            sessions.start(part)
        bad = sessions.wait(start_seconds=START_SECONDS, end_seconds=grace + 10)
    finally:
        sessions.hang_up()
    if bad is None:
        return 0
    status = bad.process.returncode
    lost = bad.ready and status == 255  # noqa: PLR2004  (ssh's own)
    if not bad.ready or lost or status < 0:
        late = f"no answer within {START_SECONDS:.0f} s" if bad.late and not bad.lines else ""
        why, hint = explain_end(status, was_ready=bad.ready, lines=bad.lines, python=python)
        out.error(MachineError(f"{bad.host}: {late or why}", hint=hint))
        return EXIT_MACHINE if not received else 128 + received[0]
    codes = [shell_status(client.process.returncode) for client in sessions.clients]
    return codes[0] or next(code for code in codes if code)
