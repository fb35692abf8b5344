"""`fsdplaunch launch` on machines over ssh: one launcher on each, one report here."""

import os
import shlex
import signal
import subprocess
import sys
import zlib
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

from fsdplaunch.cli.launch.handoff import make_run_folder, plan_elsewhere, show_sent, snapshot
from fsdplaunch.cli.launch.options import LaunchOptions
from fsdplaunch.cli.output import Output
from fsdplaunch.config.load.load import LoadedConfig
from fsdplaunch.config.schema.config import Config
from fsdplaunch.config.schema.walk import variable_of
from fsdplaunch.config.world_size import node_range
from fsdplaunch.errors import EXIT_MACHINE, MachineError
from fsdplaunch.launch.plan import LaunchTarget
from fsdplaunch.launch.report.root_cause import shell_status
from fsdplaunch.launch.run_id import GROUP_RUN, fresh_run_id
from fsdplaunch.launch.runs.registry import write_job
from fsdplaunch.launch.schedulers.launch_command import LaunchCommand
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
"""How long a machine's login and Python may take to start."""
SILENCES = 3
"""A machine ends its part when it has not heard from us for so many times launch.machine_timeout_seconds."""
_FIRST_PORT, _PORTS = 20000, 5000


def launch_over_ssh(loaded: LoadedConfig, target: LaunchTarget, launch_options: LaunchOptions, out: Output) -> int:
    """Start a launcher on each machine, show machine 0's words and the first failure, end together.

    Raises:
        LaunchError: Before anything was started, or when a machine could not be started.
    """
    run_id, config = fresh_run_id(), loaded.config
    run_dir = Path(config.launch.log_dir).absolute() / run_id
    hosts = read_hosts(config.ssh)
    check_list(config, hosts, loaded.origins)
    check_client()
    placed = _placed(config, hosts, run_id)
    python = config.ssh.python or sys.executable
    silence, module_path = config.launch.machine_timeout_seconds, os.environ.get("PYTHONPATH")
    words = [
        client_words(host.name, config.ssh, python=python, module_path=module_path, silence=silence)
        for host in hosts
    ]
    orders = [_order(placed, host, number, target, launch_options, run_id) for number, host in enumerate(hosts)]
    sent = "\n".join(f"{shlex.join(word)}\n{_shown(order)}" for word, order in zip(words, orders, strict=True))
    plan = plan_elsewhere(
        replace(loaded, config=placed), target, run_id=run_id, run_dir=run_dir, argv=words[0], sent=sent
    )
    if launch_options.dry_run or launch_options.check_only:
        show_sent(plan, loaded, sent, as_json=launch_options.as_json, out=out)
        return 0
    make_run_folder(plan, files={})
    write_job(run_dir, route="ssh", hosts=[host.name for host in hosts])
    sessions = SshSessions(_shower(hosts, out), needed=node_range(placed)[0], beat_seconds=silence / SILENCES)
    out.say(f"fsdplaunch run {run_id} over ssh on {', '.join(host.name for host in hosts)}")
    parts = [
        SessionSpec(host=host.name, words=word, order=order, output=_output(number, launch_options))
        for number, (host, word, order) in enumerate(zip(hosts, words, orders, strict=True))
    ]
    return _run(sessions, parts, placed, python, out)


def _output(number: int, launch_options: LaunchOptions) -> int | None:
    """Where a machine's standard output goes: ours; but of all that end with a JSON object, machine 0's alone."""
    return subprocess.DEVNULL if launch_options.as_json and number > 0 else None


def _placed(config: Config, hosts: list[SshHost], run_id: str) -> Config:
    """The configuration with what the list of machines says."""
    several = len(hosts) > 1
    port = config.main_process_port or _FIRST_PORT + 2 * (zlib.crc32(run_id.encode()) % _PORTS)
    slots = any(host.slots for host in hosts)
    endpoint = config.launch.rendezvous_endpoint
    return replace(
        config,
        num_machines=len(hosts),
        machine_rank=None,
        num_processes="auto" if slots else config.num_processes,
        main_process_ip=None if endpoint or not several else config.main_process_ip or _head(config, hosts),
        main_process_port=None if endpoint or not several else port,
    )


def _head(config: Config, hosts: list[SshHost]) -> str:
    return network_name(hosts[0].name, config.ssh)


def _order(
    config: Config, host: SshHost, number: int, target: LaunchTarget, launch_options: LaunchOptions, run_id: str
) -> dict[str, Any]:
    file = str(Path(config.launch.log_dir) / run_id / CONFIG)
    order = LaunchCommand(target=target, config=file, allow_unsharded=launch_options.allow_unsharded)
    env = {GROUP_RUN: f"{run_id}/try0"}
    if config.num_machines > 1:
        env[variable_of("machine_rank")] = str(number)
    if host.slots:
        env[variable_of("launch.workers_per_node")] = str(host.slots)
    command, *others = order.words([])
    return {
        "argv": [command, *(["--json"] if launch_options.as_json else []), *others],
        "folder": config.ssh.remote_dir or str(Path.cwd()),
        "env": env,
        "config_file": file,
        "config": snapshot(config, log_dir=Path(config.launch.log_dir)),
        "grace": config.launch.shutdown_grace_seconds,
        "silence": SILENCES * config.launch.machine_timeout_seconds,
    }


def _shown(order: dict[str, Any]) -> str:
    """An order for people: the configuration, which is the same everywhere, by its name only."""
    variables = " ".join(f"{name}={shlex.quote(value)}" for name, value in order["env"].items())
    return f"  cd {shlex.quote(order['folder'])} && {variables} fsdplaunch {shlex.join(order['argv'])}"


def _shower(hosts: list[SshHost], out: Output) -> Any:
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
        late = f"no answer within {START_SECONDS:.0f} s" if bad.late and not bad.said else ""
        why, hint = explain_end(status, was_ready=bad.ready, said=bad.said, python=python)
        out.error(MachineError(f"{bad.host}: {late or why}", hint=hint))
        return EXIT_MACHINE if not received else 128 + received[0]
    codes = [shell_status(client.process.returncode) for client in sessions.clients]
    return codes[0] or next(code for code in codes if code)
