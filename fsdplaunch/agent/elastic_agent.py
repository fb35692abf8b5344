"""Torch's elastic agent with our workers: ranks, restarts and barriers are torch's, processes are ours.

Runs in the agent, after the fork server has been forked.
"""

import os
import signal
from collections.abc import Sequence
from typing import Any

from torch.distributed.elastic.agent.server import local_elastic_agent
from torch.distributed.elastic.multiprocessing.api import (
    LogsDest,
    LogsSpecs,
    PContext,
    RunProcsResult,
    SignalException,
)
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.elastic.rendezvous.api import RendezvousError, rendezvous_handler_registry
from torch.distributed.launcher.api import LaunchConfig, elastic_launch
from torch.distributed.run import config_from_args, parse_args

from fsdplaunch.agent.rendezvous import AGREED_BACKEND, AgreedNodes, AgreedRendezvous, Members, Membership
from fsdplaunch.agent.worker_group import WorkerGroup
from fsdplaunch.agent.worker_spec import WorkerSpec

__all__ = ["ChildFailedError", "RendezvousError", "SignalException", "run_elastic"]


_NO_SECONDS = 1e-6
"""Torch refuses 0."""


class _RunFolderLogs(LogsSpecs):
    """Tells torch that there is nothing to redirect: the worker group does that."""

    def __init__(self, folder: str) -> None:
        super().__init__(log_dir=folder)
        self._folder = folder

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Give every stream "as it is"."""
        nothing = dict.fromkeys(range(len(envs)), "")
        return LogsDest(stdouts=nothing, stderrs=dict(nothing), error_files=dict(nothing))

    @property
    def root_log_dir(self) -> str:
        """Return where torch may say its logs are."""
        return self._folder


class _WorkerGroupContext(PContext):
    """The processes of one attempt, as torch's agent wants to see them.

    It does not install torch's signal handlers, which end everything on any signal; the agent has its own.
    """

    def __init__(
        self,
        worker_group: WorkerGroup,
        name: str,
        envs: dict[int, dict[str, str]],
        logs_specs: LogsSpecs,
        membership: Membership | None = None,
    ) -> None:
        super().__init__(name, name, dict.fromkeys(envs, ()), envs, logs_specs)
        self._worker_group = worker_group
        self._membership = membership

    def start(self) -> None:
        """Start the workers, unless the run has been asked to stop meanwhile."""
        raise_if_stopped(self._worker_group)
        self._start()

    def _start(self) -> None:
        if self._membership is not None:
            self._membership.begin()
        self._worker_group.start(self.envs)

    def pids(self) -> dict[int, int]:
        """Return process ids by local rank."""
        return {worker.local_rank: worker.pid for worker in self._worker_group.workers}

    def _poll(self) -> RunProcsResult | None:
        # Torch's agent sleeps between two looks; here it waits, and an end of a worker wakes it.
        self._worker_group.look(self._worker_group.spec.launch.monitor_interval_seconds)
        if self._worker_group.stop.number is not None:
            return self._poll_stopping()
        if not self._worker_group.failed and self._worker_group.running:
            return None
        return None if self._membership is not None and self._membership.holds() else self._outcome()

    def _poll_stopping(self) -> RunProcsResult | None:
        """Let the workers end by themselves for as long as the grace lasts; then end them."""
        worker_group, stop = self._worker_group, self._worker_group.stop
        if stop.is_warning and stop.is_over and not stop.insisted and not worker_group.failed:
            stop.number = None  # a warning: the script has saved and gone on
            return self._outcome() if not worker_group.running else None
        if worker_group.running and not stop.insisted and not stop.is_over:
            return None
        worker_group.finish(number=signal.SIGKILL)
        raise_if_stopped(worker_group)
        return None

    def _outcome(self) -> RunProcsResult:
        failed = {
            # Torch reads an error file by itself and stumbles over half a record; the worker group reads ours.
            worker.local_rank: ProcessFailure(
                local_rank=worker.local_rank, pid=worker.pid, exitcode=worker.ended.code, error_file=""
            )
            for worker in self._worker_group.failed
            if worker.ended is not None
        }
        self._worker_group.finish()
        return RunProcsResult(
            failures=failed, return_values=dict.fromkeys(self.pids()), stdouts=self.stdouts, stderrs=self.stderrs
        )

    def _close(self, death_sig: signal.Signals, timeout: int = 30) -> None:  # noqa: ARG002  (the worker group knows its own)
        self._worker_group.finish(number=death_sig)


def raise_if_stopped(worker_group: WorkerGroup) -> None:
    """Leave torch's loop when a signal has come and no worker is there to answer it."""
    number = worker_group.stop.number
    if number is not None:
        msg = f"stopped by signal {number}"
        raise SignalException(msg, signal.Signals(number))


def _leave_when_over(worker_group: WorkerGroup) -> None:
    """Leave torch's waiting for other nodes when the run was stopped, or ends while this node is done."""
    raise_if_stopped(worker_group)
    if worker_group.is_released:
        msg = "the run has ended on another node"
        raise RendezvousError(msg)


def read_options(options: Sequence[str]) -> LaunchConfig:
    """Have torchrun's own parser read its options.

    It takes a PET_ variable for each one that is not given, which a cluster's operator sets for a bare torchrun.
    What they say has been decided by now; workers still see them.
    """
    for name in [name for name in os.environ if name.startswith("PET_")]:
        del os.environ[name]
    return config_from_args(parse_args([*options, "--no-python", "worker"]))[0]


def run_elastic(options: Sequence[str], worker_group: WorkerGroup, *, secret: str = "") -> None:
    """Run torch's agent with torchrun's options until the workers are done.

    Args:
        options: As torchrun takes them.
        worker_group: Starts and watches the workers.
        secret: The run's; empty on a lone node.

    Raises:
        ChildFailedError: Workers failed and no restart is left.
        SignalException: The run was stopped.
        RendezvousError: The nodes did not find each other.
    """
    config = read_options(options)
    config.monitor_interval = _NO_SECONDS
    config.logs_specs = _RunFolderLogs(str(worker_group.spec.run_dir))
    handler = _use_own_rendezvous(config, worker_group, secret)

    def start_processes(name: str, envs: dict[int, dict[str, str]], logs_specs: LogsSpecs, **_: Any) -> PContext:
        # Torch counts the failures of this node; workers of older torch share keys by it.
        envs = {rank: env | {"TORCHELASTIC_RESTART_COUNT": str(handler.attempt)} for rank, env in envs.items()}
        context = _WorkerGroupContext(worker_group, name, envs, logs_specs, handler.membership)
        try:
            context.start()
        except BaseException:
            context.close()
            raise
        return context

    # Torch has no way to pass in another kind of process. The agent calls this function by its name in its own
    # module (torch 2.6 to 2.13 at least), so replacing that name leaves everything else of torch's as it is.
    setattr(local_elastic_agent, "start_processes", start_processes)  # noqa: B010  (its type is narrower)
    elastic_launch(config, "worker")()


def _use_own_rendezvous(config: LaunchConfig, worker_group: WorkerGroup, secret: str) -> AgreedRendezvous:
    """Put a rendezvous of ours in the place of torch's, which listens on all addresses and reads pickles."""
    agreed = _agreed_nodes(config, worker_group.spec, secret)
    membership = None
    if config.max_nodes > config.min_nodes:
        membership = Membership(worker_group, Members(0, agreed.rank, agreed.nodes))
    handler = AgreedRendezvous(agreed, lambda: _leave_when_over(worker_group), membership)
    config.rdzv_backend = AGREED_BACKEND
    rendezvous_handler_registry.register(AGREED_BACKEND, lambda _params: handler)
    return handler


def _agreed_nodes(config: LaunchConfig, spec: WorkerSpec, secret: str) -> AgreedNodes:
    host, _, port = config.rdzv_endpoint.rpartition(":")
    settings = config.rdzv_configs
    return AgreedNodes(
        run_id=config.run_id,
        rank=(spec.node or 0) if config.max_nodes > 1 else 0,
        nodes=config.max_nodes,
        host=host.removeprefix("[").removesuffix("]"),
        port=int(port),
        secret=secret,
        held=spec.held,
        join_seconds=float(settings.get("join_timeout", settings.get("timeout", 300))),
        read_seconds=float(settings.get("read_timeout", 60)),
    )
