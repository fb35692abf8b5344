"""A run that starts elsewhere: its plan, its folder, what --dry-run shows, what is said once it is submitted."""

import os
import shlex
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from fsdplaunch.cli.launch.options import LaunchRequest
from fsdplaunch.cli.output import Output
from fsdplaunch.config.schema.config import Config, SshSection
from fsdplaunch.config.world_size import node_range
from fsdplaunch.config.write.render import render
from fsdplaunch.launch.node_workers import NodeFacts
from fsdplaunch.launch.plan import LaunchPlan, build_plan
from fsdplaunch.launch.run_id import fresh_run_id
from fsdplaunch.launch.runs.registry import write_job
from fsdplaunch.launch.secret_variables import without_secrets
from fsdplaunch.probe.scheduler import count_gpus
from fsdplaunch.run_dir import CONFIG, PLAN, PRIVATE_MODE, link_latest, write_json, write_text
from fsdplaunch.run_secret import SECRET, make_secret


class Handoff:
    """One run that is handed to a scheduler or to other nodes.

    Attributes:
        run_id: The run's name.
        run_dir: Its folder, absolute.
    """

    def __init__(self, request: LaunchRequest, out: Output) -> None:
        self._request, self._out = request, out
        self.run_id = fresh_run_id()
        self.run_dir = Path(request.config.launch.log_dir).absolute() / self.run_id

    def plan(self, argv: Sequence[str], *, sent: str, config: Config | None = None) -> LaunchPlan:
        """Return the plan of a run whose nodes are not known yet; its command is what hands it over.

        Args:
            argv: The command that hands it over.
            sent: What that command is given to read.
            config: The configuration, where it is not the request's.
        """
        config, loaded = config or self._request.config, self._request.loaded
        gpus = count_gpus(config.slurm.gpus_per_node or "") or 0
        workers = config.launch.workers_per_node
        if not config.use_cpu and not gpus:
            gpus = workers if isinstance(workers, int) else 0
        node = NodeFacts(gpus=gpus, cpus=config.slurm.cpus_per_task or 1, tpu_chips=1, environ=os.environ)
        placed = replace(
            config,
            num_machines=node_range(config)[0],
            machine_rank=0,
            main_process_ip=config.main_process_ip or "node-0",
            launch=replace(config.launch, workers_per_node=workers if gpus or workers != "gpu" else 1),
        )
        target = self._request.target
        plan = build_plan(placed, node=node, target=target, run_id=self.run_id, run_dir=self.run_dir)
        return replace(plan, argv=tuple(argv), env={}, config=config, notes=tuple(loaded.note_lines()), sent=sent)

    def is_only_shown(self, plan: LaunchPlan) -> bool:
        """Print exactly what would be sent, and what would send it, where nothing is to be started."""
        if not self._request.starts_nothing:
            return False
        path = self._request.loaded.path
        if self._request.options.as_json:
            self._out.json({"config": str(path) if path else None, **plan.to_dict()})
            return True
        for note in plan.notes:
            self._out.note(note)
        self._out.say(f"would run: {shlex.join(plan.argv)}")
        self._out.data((plan.sent or "").rstrip("\n"))
        return True

    def secrets(self) -> dict[str, str]:
        """Return the variables that reach the nodes unseen: the run's own secret, and the configuration's."""
        secret = os.environ.get(SECRET) or make_secret()
        return {SECRET: secret, **without_secrets(self._request.config)[1]}

    def write_folder(self, plan: LaunchPlan, files: Mapping[str, str], *, private: Collection[str] = ()) -> None:
        """Write the plan, the configuration and what is sent into the run's folder.

        Args:
            plan: The run's.
            files: Further files, by name.
            private: Those that only this user is to read.
        """
        self.run_dir.mkdir(parents=True)
        write_json(self.run_dir / PLAN, plan.to_dict(), mode=PRIVATE_MODE)
        texts = {CONFIG: snapshot(plan.config, log_dir=self.run_dir.parent), **files}
        for name, text in texts.items():
            write_text(self.run_dir / name, text, mode=PRIVATE_MODE if name in private else None)
        link_latest(self.run_dir)

    def submitted(self, words: str, *, route: str, shown: Mapping[str, Any], **more: Any) -> int:
        """Note that the scheduler has the run, say so, and follow it when that was requested; return the status.

        Args:
            words: What to say.
            route: The scheduler.
            shown: What the scheduler knows the run by.
            more: What else is noted of it.
        """
        options = self._request.options
        write_job(self.run_dir, route=route, **shown, **more)
        if options.as_json and not options.follow:
            self._out.json({"run_id": self.run_id, "run_dir": str(self.run_dir), "route": route, **shown})
        self._out.say(words)
        if not options.follow:
            return 0
        from fsdplaunch.cli.launch.runs import follow_run

        return follow_run(self.run_dir, self._out)


def snapshot(config: Config, *, log_dir: Path) -> str:
    """Return the configuration as every node's launcher gets it: resolved, without origins and secrets."""
    config = without_secrets(config)[0]
    launch = replace(config.launch, log_dir=str(log_dir))
    return render(replace(config, launch=launch, ssh=SshSection()), full=True, comments=False)
