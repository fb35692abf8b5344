"""`fsdplaunch doctor`: what this machine has, what stands in the way, and whether all workers reach each other."""

import getpass
import json
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from fsdplaunch import __version__
from fsdplaunch.cli.output import Output
from fsdplaunch.cli.single_node import plan_for_this_node
from fsdplaunch.config.load import LoadedConfig, load_config
from fsdplaunch.config.problems import ConfigError
from fsdplaunch.config.schema.config import all_keys, value_at
from fsdplaunch.display_text import counted
from fsdplaunch.doctor.checks import check_connections, run_checks, status_of, summary
from fsdplaunch.doctor.facts import Check, DoctorFacts, bug_report_block, collect_facts
from fsdplaunch.errors import MachineError
from fsdplaunch.launch.coordination import network
from fsdplaunch.launch.coordination.placement import find_placement
from fsdplaunch.launch.coordination.secret_source import SecretSource, find_secret
from fsdplaunch.launch.entry_points import NETWORK_TEST
from fsdplaunch.launch.plan import LaunchTarget
from fsdplaunch.launch.run_result import failure_lines
from fsdplaunch.launch.runner import run_plan
from fsdplaunch.probe.hardware import read_hardware
from fsdplaunch.run_secret import SECRET

_ANSWER = "network.json"


def _measure_network(
    loaded: LoadedConfig | None, checks: Sequence[Check], out: Output
) -> tuple[list[Check], dict[str, Any] | None]:
    """Run the test; return what it means and what was measured."""
    if loaded is None or any(check.status == "problem" for check in checks):
        text = "not tested: solve the problems above first"
        return [Check(topic="all-reduce", status="skipped", text=text)], None
    config = loaded.config
    if config.distributed_type != "FSDP":
        config = replace(config, distributed_type="FSDP")  # so that the workers get a process group
    hardware = read_hardware(os.environ)
    target = LaunchTarget(name=NETWORK_TEST, is_module=True)
    plan = plan_for_this_node(replace(loaded, config=config), hardware, target, allow_unsharded=True)
    source = None
    if plan.nodes > 1:
        out.say(f"waiting for the other {plan.nodes - 1} nodes: run fsdplaunch doctor --network on each of them")
        place = find_placement(config, os.environ)
        source = find_secret(config, place, os.environ, address=network.own_address())
    out.say(f"testing the connections of {counted(plan.world_size, 'worker')}")
    try:
        secret = _secret(source, is_first=not config.machine_rank) if source is not None else ""
        result = run_plan(plan, output=sys.stderr.fileno(), secret=secret)
    finally:
        if source is not None:
            source.withdraw()
    if result.failure is not None:
        lines = failure_lines(result, run_dir=str(plan.run_dir))
        return [Check(topic="all-reduce", status="problem", text="\n".join(lines).strip())], None
    answer = plan.run_dir / _ANSWER
    if not answer.is_file():
        return [Check(topic="all-reduce", status="skipped", text="rank 0's node reports what was found")], None
    measured: dict[str, Any] = json.loads(answer.read_text(encoding="utf-8"))
    return list(check_connections(measured)), measured


def _secret(source: SecretSource, *, is_first: bool) -> str:
    """Return the secret that the nodes of the test share.

    Raises:
        MachineError: This is not node 0, and finds none.
    """
    if secret := source.offer() if is_first else source.wait():
        return secret
    msg = "the nodes prove a secret to each other, and this node has none"
    hint = f"start node 0 first, in a folder that the nodes share, or set {SECRET} on every node"
    raise MachineError(msg, hint=hint)


def doctor(
    *,
    file: Path | None,
    out: Output,
    overrides: Sequence[str] = (),
    network: bool = False,
    no_torch: bool = False,
    paste: bool = False,
    as_json: bool = False,
) -> int:
    """Look at this machine and say what was found.

    Returns:
        0, or 3 when this machine cannot train as configured.
    """
    loaded, errors = _load(file, overrides)
    torch = None
    if not no_torch:
        from fsdplaunch.doctor.facts import probe_torch

        torch = probe_torch()
    facts = collect_facts(loaded, config_errors=errors, torch=torch, environ=os.environ)
    checks = run_checks(facts)
    measured = None
    if network:
        found, measured = _measure_network(loaded, checks, out)
        checks += found
    if paste:
        out.data(bug_report_block(facts, checks, version=__version__, settings=_settings(loaded), users=_users()))
    elif as_json:
        out.json({"checks": [asdict(check) for check in checks], "network": measured, "facts": _plain(facts)})
    else:
        show(checks, out)
    return status_of(checks)


def _load(file: Path | None, overrides: Sequence[str]) -> tuple[LoadedConfig | None, tuple[str, ...]]:
    """Return the configuration, or what is wrong with it: a doctor goes on where others stop."""
    try:
        return load_config(file, overrides=overrides), ()
    except ConfigError as error:
        return None, tuple(str(problem).splitlines()[0] for problem in error.problems)


def show(checks: Sequence[Check], out: Output) -> None:
    """Print one line per check, and a hint below."""
    wide = max(len(check.topic) for check in checks)
    for check in checks:
        out.data(f"{check.status:<8} {check.topic:<{wide}}  {check.text}")
        if check.hint:
            out.data(f"{'':<8} {'':<{wide}}  {check.hint}")
    out.data(summary(checks))


def _settings(loaded: LoadedConfig | None) -> dict[str, str]:
    if loaded is None:
        return {}
    values = [(spec, value_at(loaded.config, spec.path)) for spec in all_keys()]
    return {
        spec.dotted: spec.key.kind.write(value)
        for spec, value in values
        if value != spec.default and value is not None
    }


def _users() -> list[str]:
    names = [os.environ.get(name, "") for name in ("USER", "LOGNAME", "SUDO_USER")]
    with suppress(OSError, KeyError):
        names.append(getpass.getuser())
    return [name for name in names if name not in ("", "root")]


def _plain(facts: DoctorFacts) -> dict[str, object]:
    """Return the facts as plain data, without the configuration, which `config show --json` prints."""
    found = asdict(facts)
    del found["config"]
    peers = {f"{first}-{second}": can for (first, second), can in facts.driver.peers.items()}
    return {**found, "driver": {**found["driver"], "peers": peers}}
