"""A run that starts elsewhere: its plan and folder, and SLURM, Kubernetes or nodes over ssh that get it."""

import os
import re
import shlex
import signal
import subprocess
import sys
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

from fsdplaunch import run_dir
from fsdplaunch.cli.output import Output
from fsdplaunch.cli.single_node import PROGRAM, LaunchRequest
from fsdplaunch.config.render import render
from fsdplaunch.config.resolve import node_range
from fsdplaunch.config.schema.config import Config, variable_of
from fsdplaunch.config.schema.launch_sections import SshSection
from fsdplaunch.errors import EXIT_MACHINE, MachineError, UsageError
from fsdplaunch.features import KUBERNETES, feature
from fsdplaunch.launch.plan import LaunchPlan, NodeFacts, build_plan
from fsdplaunch.launch.root_cause import shell_status
from fsdplaunch.launch.runs import write_job
from fsdplaunch.launch.schedulers import ssh
from fsdplaunch.launch.secret_variables import as_variable, without_variables
from fsdplaunch.probe.scheduler import count_gpus
from fsdplaunch.run_secret import SECRET, make_secret


class _Handoff:
    """One run that is handed to a scheduler or to other nodes, by its name, with its folder (absolute)."""

    def __init__(self, request: LaunchRequest, out: Output) -> None:
        self._request, self._out = request, out
        self.run_id = run_dir.fresh_run_id()
        self.run_dir = Path(request.config.launch.log_dir).absolute() / self.run_id

    def plan(self, argv: Sequence[str], *, sent: str, config: Config | None = None) -> LaunchPlan:
        """Return the plan of a run whose nodes are not known yet; `argv` hands it over, and reads what is sent."""
        config = config or self._request.config
        gpus = count_gpus(config.slurm.gpus_per_node or "") or 0
        workers = config.launch.workers_per_node
        if not config.use_cpu and not gpus:
            gpus = workers if isinstance(workers, int) else 0
        node = NodeFacts(
            gpus=list(map(str, range(gpus))), cpus=config.slurm.cpus_per_task or 1, tpu_chips=1, environ=os.environ
        )
        placed = replace(
            config,
            num_machines=node_range(config)[0],
            machine_rank=0,
            main_process_ip=config.main_process_ip or "node-0",
            launch=replace(config.launch, workers_per_node=workers if gpus or workers != "gpu" else 1),
        )
        target, notes = self._request.target, tuple(self._request.loaded.note_lines())
        plan = build_plan(placed, node=node, target=target, run_id=self.run_id, run_dir=self.run_dir)
        places = self._request.loaded.places()
        return replace(plan, argv=tuple(argv), env={}, config=config, notes=notes, origins=places, sent=sent)

    def is_only_shown(self, plan: LaunchPlan) -> bool:
        request, out = self._request, self._out
        if not (request.dry_run or request.check_only):
            return False
        if request.as_json:
            out.json({"config": request.file, **plan.to_dict()})
            return True
        for note in plan.notes:
            out.note(note)
        out.say(f"would run: {shlex.join(plan.argv)}")
        out.data((plan.sent or "").rstrip("\n"))
        return True

    def secrets(self) -> dict[str, str]:
        """Return the variables that reach the nodes unseen: the run's own secret, and the configuration's."""
        secret = os.environ.get(SECRET) or make_secret()
        return {SECRET: secret, **as_variable(self._request.config)}

    def write_folder(self, plan: LaunchPlan, files: Mapping[str, str]) -> None:
        """Write the plan, the configuration and further files."""
        self.run_dir.mkdir(parents=True, mode=run_dir.FOLDER_MODE)
        run_dir.write_json(self.run_dir / run_dir.PLAN, plan.to_dict())
        for name, text in {run_dir.CONFIG: _snapshot(plan.config, log_dir=self.run_dir.parent), **files}.items():
            run_dir.write_text(self.run_dir / name, text)
        run_dir.link_latest(self.run_dir)

    def submitted(self, words: str, *, route: str, shown: Mapping[str, Any], **more: Any) -> int:
        """Note that the scheduler has the run, say so in these words, and follow it when that was requested.

        `shown` is what the scheduler knows the run by; `more` is noted beside it.
        """
        request = self._request
        write_job(self.run_dir, route=route, **shown, **more)
        if request.as_json and not request.follow:
            self._out.json({"run_id": self.run_id, "run_dir": str(self.run_dir), "route": route, **shown})
        self._out.say(words)
        if not request.follow:
            return 0
        from fsdplaunch.cli.runs import follow_run

        return follow_run(self.run_dir, self._out)


def _snapshot(config: Config, *, log_dir: Path) -> str:
    """Return the configuration as every node's launcher gets it: resolved, without origins and launch.env."""
    launch = replace(without_variables(config).launch, log_dir=str(log_dir))
    return render(replace(config, launch=launch, ssh=SshSection()), full=True, comments=False)


SCRIPT, SECRETS = "job.sbatch", "secrets.sh"
"""The batch script, and the variables that only this user is to read (0600), which it reads."""


def launch_on_slurm(request: LaunchRequest, out: Output) -> int:
    """Write a batch script into the run's folder and submit it."""
    from fsdplaunch.launch.schedulers.slurm import batch_script, submit

    config, handoff = request.config, _Handoff(request, out)
    run_id, folder = handoff.run_id, handoff.run_dir
    python = "python3" if config.slurm.container_image else sys.executable
    words = request.words([python, *PROGRAM], str(folder / run_dir.CONFIG))
    secrets = folder / SECRETS
    text = batch_script(config, words, run_id=run_id, run_dir=folder, folder=Path.cwd(), secrets=secrets)
    plan = handoff.plan(("sbatch", "--parsable", str(folder / SCRIPT)), sent=text)
    if handoff.is_only_shown(plan):
        return 0
    if not (config.use_cpu or config.slurm.gpus_per_node or re.search("gpu|gres", " ".join(config.slurm.lines))):
        without = "the job gets no GPUs unless the partition gives them to every job"
        out.note(f"slurm.gpus_per_node is not set: {without}")
    exports = "".join(f"export {name}={shlex.quote(value)}\n" for name, value in handoff.secrets().items())
    handoff.write_folder(plan, {SCRIPT: text, SECRETS: exports})
    job = submit(str(folder / SCRIPT))
    sentence = f"run {run_id} is SLURM job {job}; fsdplaunch runs logs {run_id} --follow, runs cancel {run_id}"
    return handoff.submitted(sentence, route="slurm", shown={"job": job})


def launch_on_kubernetes(request: LaunchRequest, out: Output) -> int:
    """Apply the run's objects, or print them."""
    import yaml

    kubernetes = feature(KUBERNETES)
    config, kube, handoff = request.config, request.config.kubernetes, _Handoff(request, out)
    run_id, name = handoff.run_id, kubernetes.object_name(handoff.run_id)
    text = _snapshot(config, log_dir=Path(config.launch.log_dir))
    words = request.words(kubernetes.PROGRAM, f"{kubernetes.CONFIG_FOLDER}/{kubernetes.CONFIG_KEY}")
    made = kubernetes.objects(config, words, run_id=run_id, snapshot=text, secrets=handoff.secrets())
    sent = yaml.safe_dump_all(made, sort_keys=False, width=10**6)
    plan = handoff.plan(kubernetes.words_for(["apply", "-f", "-"], kube.namespace), sent=sent)
    if handoff.is_only_shown(plan):
        return 0
    out.say(kubernetes.apply(sent, kube.namespace))
    open_to_all = [one for one in made if one["kind"] != "Secret"]
    kept = yaml.safe_dump_all(open_to_all, sort_keys=False, width=10**6)
    handoff.write_folder(replace(plan, sent=kept), {"objects.yaml": kept})
    follow = f"fsdplaunch runs logs {run_id} --follow"
    sentence = f"run {run_id} is job {name}; {follow}, runs cancel {run_id} deletes it"
    return handoff.submitted(sentence, route="kubernetes", shown={"name": name}, namespace=kube.namespace)


START_SECONDS = 30.0
"""How long a node's login and Python may take to start."""
SILENCES = 3
"""A node ends its part when it has not heard from us for so many times launch.machine_timeout_seconds."""
_FIRST_PORT, _PORTS = 20000, 5000


def launch_over_ssh(request: LaunchRequest, out: Output) -> int:
    """Start a launcher on each node, show node 0's output and the first failure, end together."""
    config, handoff = request.config, _Handoff(request, out)
    hosts = ssh.read_hosts(config.ssh)
    for message, hint in ssh.contradictions(config, hosts, request.loaded.origins):
        raise UsageError(message, hint=hint)
    ssh.check_client()
    joins = len(hosts) > 1 and not config.launch.rendezvous_endpoint
    port = config.main_process_port or _FIRST_PORT + 2 * (zlib.crc32(handoff.run_id.encode()) % _PORTS)
    placed = replace(
        config,
        num_machines=len(hosts),
        machine_rank=None,
        num_processes="auto" if any(host.slots for host in hosts) else config.num_processes,
        main_process_ip=(config.main_process_ip or ssh.network_name(hosts[0].name, config.ssh)) if joins else None,
        main_process_port=port if joins else None,
    )
    python = config.ssh.python or sys.executable
    secrets, silence = handoff.secrets(), config.launch.machine_timeout_seconds
    file = str(Path(config.launch.log_dir) / handoff.run_id / run_dir.CONFIG)
    task: dict[str, Any] = {
        "argv": request.words([], file, as_json=request.as_json),
        "folder": config.ssh.remote_dir or str(Path.cwd()),
        "config_file": file,
        "config": _snapshot(placed, log_dir=Path(config.launch.log_dir)),
        "grace": config.launch.shutdown_grace_seconds,
        "silence": SILENCES * silence,
    }
    parts, lines = [], []
    for rank, host in enumerate(hosts):
        env = {run_dir.GROUP_RUN: f"{handoff.run_id}/try0"}
        if len(hosts) > 1:
            env[variable_of("machine_rank")] = str(rank)
        if host.slots:
            env[variable_of("launch.workers_per_node")] = str(host.slots)
        module_path = os.environ.get("PYTHONPATH")
        words = ssh.client_words(host.name, config.ssh, python=python, module_path=module_path, silence=silence)
        # Of all nodes that end with a JSON object, node 0's alone is shown.
        output = subprocess.DEVNULL if request.as_json and rank > 0 else None
        task_here = {**task, "env": env}
        parts.append(ssh.SessionSpec(host=host.name, words=words, task=task_here, secrets=secrets, output=output))
        variables = " ".join(f"{name}={shlex.quote(value)}" for name, value in env.items())
        there = f"cd {shlex.quote(task['folder'])} && {variables} fsdplaunch {shlex.join(task['argv'])}"
        lines += [shlex.join(words), f"  {there}"]
    plan = handoff.plan(parts[0].words, sent="\n".join(lines), config=placed)
    if handoff.is_only_shown(plan):
        return 0
    handoff.write_folder(plan, {})
    names = [host.name for host in hosts]
    write_job(handoff.run_dir, route="ssh", hosts=names)

    def show(host: str, line: str) -> None:
        out.say(line if host == names[0] else f"[{host}] {line}")

    sessions = ssh.SshSessions(show, needed=node_range(placed)[0], beat_seconds=silence / SILENCES)
    out.say(f"fsdplaunch run {handoff.run_id} over ssh on {', '.join(names)}")
    return _run(sessions, parts, placed, python, out)


def _run(sessions: ssh.SshSessions, parts: list[ssh.SessionSpec], config: Config, python: str, out: Output) -> int:
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
    if not bad.ready or status == ssh.SSH_FAILED or status < 0:
        late = f"no answer within {START_SECONDS:.0f} s" if bad.late and not bad.lines else ""
        why, hint = ssh.explain_end(status, was_ready=bad.ready, lines=bad.lines, python=python)
        out.error(MachineError(f"{bad.host}: {late or why}", hint=hint))
        return EXIT_MACHINE if not received else 128 + received[0]
    codes = [shell_status(client.process.returncode) for client in sessions.clients]
    return codes[0] or next(code for code in codes if code)
