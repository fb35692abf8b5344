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
from fsdplaunch.doctor.facts import Check, bug_report_block, collect_facts, probe_torch
from fsdplaunch.errors import MachineError
from fsdplaunch.launch.coordination.network import own_address
from fsdplaunch.launch.coordination.placement import find_placement
from fsdplaunch.launch.coordination.secret_source import find_secret
from fsdplaunch.launch.entry_points import NETWORK_TEST
from fsdplaunch.launch.plan import LaunchTarget
from fsdplaunch.launch.run_result import failure_lines
from fsdplaunch.launch.runner import run_plan
from fsdplaunch.launch.secret_variables import with_hidden_values
from fsdplaunch.probe.hardware import read_hardware
from fsdplaunch.run_secret import SECRET

_ANSWER = "network.json"


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
    """Look at this machine and say what was found; the status is 3 when it cannot train as configured."""
    loaded: LoadedConfig | None = None
    errors: tuple[str, ...] = ()
    try:
        loaded = load_config(file, overrides=overrides)
    except ConfigError as error:  # a doctor goes on where others stop
        errors = tuple(str(problem).splitlines()[0] for problem in error.problems)
    torch = None if no_torch else probe_torch()
    facts = collect_facts(loaded, config_errors=errors, torch=torch, environ=os.environ)
    checks, measured = run_checks(facts), None
    if network:
        found, measured = _measure_network(loaded, checks, out)
        checks += found
    if paste:
        settings = {}
        for spec in all_keys():
            value = value_at(with_hidden_values(loaded.config), spec.path) if loaded is not None else None
            if value != spec.default and value is not None:
                settings[spec.dotted] = spec.key.kind.write(value)
        users = [os.environ.get(name, "") for name in ("USER", "LOGNAME", "SUDO_USER")]
        with suppress(OSError, KeyError):
            users.append(getpass.getuser())
        users = [name for name in users if name not in ("", "root")]
        out.data(bug_report_block(facts, checks, version=__version__, settings=settings, users=users))
    elif as_json:
        plain = asdict(facts)
        del plain["config"]  # which `config show --json` prints
        plain["driver"]["peers"] = {
            f"{first}-{second}": can for (first, second), can in facts.driver.peers.items()
        }
        out.json({"checks": [asdict(check) for check in checks], "network": measured, "facts": plain})
    else:
        wide = max(len(check.topic) for check in checks)
        for check in checks:
            out.data(f"{check.status:<8} {check.topic:<{wide}}  {check.text}")
            if check.hint:
                out.data(f"{'':<8} {'':<{wide}}  {check.hint}")
        out.data(summary(checks))
    return status_of(checks)


def _measure_network(
    loaded: LoadedConfig | None, checks: Sequence[Check], out: Output
) -> tuple[list[Check], dict[str, Any] | None]:
    if loaded is None or any(check.status == "problem" for check in checks):
        return [Check("all-reduce", "skipped", "not tested: solve the problems above first")], None
    config = loaded.config
    if config.distributed_type != "FSDP":
        config = replace(config, distributed_type="FSDP")  # so that the workers get a process group
    hardware = read_hardware(os.environ)
    target = LaunchTarget(name=NETWORK_TEST, is_module=True)
    plan = plan_for_this_node(replace(loaded, config=config), hardware, target, allow_unsharded=True)
    source, secret = None, ""
    if plan.nodes > 1:
        out.say(f"waiting for the other {plan.nodes - 1} nodes: run fsdplaunch doctor --network on each of them")
        place = find_placement(config, os.environ)
        source = find_secret(config, place, os.environ, address=own_address())
    out.say(f"testing the connections of {counted(plan.world_size, 'worker')}")
    try:
        if source is not None:
            secret = source.wait() if config.machine_rank else source.offer()
            if not secret:
                msg = "the nodes authenticate to each other with a secret, and this node has none"
                hint = f"start node 0 first, in a folder that the nodes share, or set {SECRET} on every node"
                raise MachineError(msg, hint=hint)
        result = run_plan(plan, output=sys.stderr.fileno(), secret=secret)
    finally:
        if source is not None:
            source.withdraw()
    if result.failure is not None:
        lines = failure_lines(result, run_dir=str(plan.run_dir))
        return [Check("all-reduce", "problem", "\n".join(lines).strip())], None
    answer = plan.run_dir / _ANSWER
    if not answer.is_file():
        return [Check("all-reduce", "skipped", "rank 0's node reports the result")], None
    measured: dict[str, Any] = json.loads(answer.read_text(encoding="utf-8"))
    return list(check_connections(measured)), measured
