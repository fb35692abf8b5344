"""A real SLURM on one machine: slurmctld outside, one slurmd in each machine's namespace. Needs root.

Its times are shorter than a cluster's: a job that goes back into the queue waits until its old credential has
expired (cred_expire, else two minutes), and a machine is given up after SlurmdTimeout (else five minutes).
"""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from tests.cluster.lab import Lab, clean_environ

SETTINGS = """\
ClusterName=lab
SlurmctldHost={control}({gateway})
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={state}/munge.socket,cred_expire=5
CredType=cred/munge
SlurmctldPort={port}
SlurmdPort=6818
StateSaveLocation={state}/ctld
SlurmdSpoolDir={state}/spool-%n
SlurmctldPidFile={state}/slurmctld.pid
SlurmdPidFile={state}/slurmd-%n.pid
SlurmctldLogFile={state}/slurmctld.log
SlurmdLogFile={state}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
MpiDefault=none
SwitchType=switch/none
ReturnToService=2
SlurmctldTimeout=30
SlurmdTimeout=6
MessageTimeout=3
KillWait=5
MinJobAge=300
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=1,bf_interval=1,batch_sched_delay=0,sched_min_interval=0
JobRequeue=1
SlurmdParameters=config_overrides
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
"""


class Slurm:
    """Some machines under SLURM, all in partition `low`; jobs of `high` put those of `low` back into the queue."""

    def __init__(self, lab: Lab) -> None:
        self.lab = lab
        self.state = Path(tempfile.mkdtemp(prefix="slurm-"))
        self.daemons: list[subprocess.Popen[bytes]] = []
        self.environ = clean_environ() | {"SLURM_CONF": str(self.state / "slurm.conf")}

    def up(self) -> None:
        self._write()
        key = self.state / "munge.key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o400)
        munged = ["munged", "--force", f"--key-file={key}", f"--socket={self.state}/munge.socket"]
        munged += [f"--pid-file={self.state}/munged.pid", f"--log-file={self.state}/munged.log"]
        self._daemon(*munged, f"--seed-file={self.state}/munged.seed", "--num-threads=2", "--foreground")
        wait_until((self.state / "munge.socket").exists, 10)
        self._daemon("slurmctld", "-D", "-c")
        for machine in range(self.lab.size):
            self.start_machine(machine)
        wait_until(lambda: self.states().count("idle") == self.lab.size, 20, self.logs)

    def _write(self) -> None:
        lines = [
            SETTINGS.format(
                control=os.uname().nodename,
                port=20000 + os.getpid() % 10000,
                gateway=self.lab.gateway,
                state=self.state,
            )
        ]
        for machine in range(self.lab.size):
            (self.state / f"spool-host{machine}").mkdir()
            about = f"NodeName=host{machine} NodeHostname=host{machine} NodeAddr={self.lab.address(machine)}"
            lines.append(f"{about} CPUs=4 RealMemory=2000 State=UNKNOWN")
        nodes = f"Nodes=host[0-{self.lab.size - 1}] MaxTime=INFINITE State=UP OverSubscribe=NO"
        lines.append(f"PartitionName=low {nodes} Default=YES PriorityTier=1 GraceTime=20")
        lines.append(f"PartitionName=high {nodes} PriorityTier=10")
        (self.state / "ctld").mkdir()
        (self.state / "slurm.conf").write_text("\n".join(lines) + "\n")
        # slurmd 22.05 always loads a cgroup plugin and dies where it finds none; nothing here uses it.
        version = subprocess.run(["slurmd", "-V"], capture_output=True, text=True).stdout.split()[-1]
        plugin = "cgroup/v1" if version.startswith("22.") else "disabled"
        (self.state / "cgroup.conf").write_text(f"CgroupPlugin={plugin}\n")

    def _daemon(self, *words: str) -> None:
        """Start a daemon that ends with us, whatever ends us."""
        with (self.state / "output.log").open("ab") as log:
            process = subprocess.Popen(
                ["setpriv", "--pdeathsig", "TERM", *words],
                env=self.environ,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self.daemons.append(process)

    def start_machine(self, machine: int) -> None:
        self._daemon(*self.lab.inside(machine), "slurmd", "-D", "-N", f"host{machine}")

    def kill_daemon(self, machine: int) -> None:
        """slurmd is gone at once; what it started goes on."""
        (pid,) = (pid for pid, said in self.lab.processes(machine).items() if said.startswith(b"slurmd\0"))
        os.kill(pid, signal.SIGKILL)

    def launchers(self, machine: int) -> list[int]:
        """Processes of fsdplaunch, its agent and its workers."""
        return [pid for pid, said in self.lab.processes(machine).items() if b"fsdplaunch" in said]

    def run(self, *words: str | Path, cwd: Path, seconds: float = 60, **env: str):
        """Run a command where jobs are submitted."""
        return subprocess.run(
            [*map(str, words)],
            cwd=cwd,
            env=self.environ | env,
            capture_output=True,
            text=True,
            timeout=seconds,
            stdin=subprocess.DEVNULL,
        )

    def fsdplaunch(self, *words: str | Path, cwd: Path, seconds: float = 60, **env: str):
        return self.run(sys.executable, "-P", "-m", "fsdplaunch", *words, cwd=cwd, seconds=seconds, **env)

    def states(self) -> list[str]:
        done = subprocess.run(
            ["sinfo", "-h", "-N", "-p", "low", "-o", "%T"], env=self.environ, capture_output=True
        )
        return done.stdout.decode().split()

    def job_state(self, job: str) -> str:
        words = ["squeue", "-h", "-t", "all", "-j", job, "-o", "%T"]
        return subprocess.run(words, env=self.environ, capture_output=True, text=True).stdout.strip()

    def wait_for_end(self, job: str, seconds: float = 90, about: Callable[[], str] = lambda: "") -> None:
        """Wait until a job has ended well; fail as soon as it has ended otherwise."""
        ended = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED")
        wait_until(lambda: self.job_state(job) in ended, seconds, lambda: about() + self.logs())
        assert self.job_state(job) == "COMPLETED", about() + self.logs()

    def logs(self) -> str:
        texts = [f"--- {path.name}\n{path.read_text()[-1500:]}" for path in sorted(self.state.glob("*.log"))]
        return "\n".join([*texts, str(self.states())])

    def down(self) -> None:
        subprocess.run(["scancel", "-u", "root"], env=self.environ, capture_output=True)
        for process in reversed(self.daemons):  # munged last: the others speak through it
            process.terminate()
            try:
                process.wait(5)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        shutil.rmtree(self.state, ignore_errors=True)


def wait_until(true, seconds: float = 30, about=lambda: "") -> None:
    stop = time.monotonic() + seconds
    while not true():
        if time.monotonic() > stop:
            raise AssertionError(f"it did not happen within {seconds} s\n{about()}")
        time.sleep(0.1)
