"""What is sent on each route: every word arrives as it was typed, and nothing in between evaluates it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from fsdplaunch.cli.single_node import LaunchRequest
from fsdplaunch.config.schema.config import Config, LaunchSection, SlurmSection, SshSection
from fsdplaunch.errors import MachineError, UsageError
from fsdplaunch.launch.coordination.placement import assumed_settings, find_placement
from fsdplaunch.launch.plan import LaunchTarget
from fsdplaunch.launch.schedulers.slurm import batch_script
from fsdplaunch.launch.schedulers.ssh import check_client, client_words, explain_end, read_hosts

ODD = ("a b", "$(touch evaluated)", 'it\'s "quoted"', "two\nlines", "`id`", "$HOME", "\\", "*", "", "--x=1;2", "&")
SCRIPT = "my 'odd' $(touch evaluated).py"
TARGET = LaunchTarget(name=SCRIPT, arguments=ODD)


def words_of(
    program: list[str], target: LaunchTarget = TARGET, *, config: str | None = "a config.yaml"
) -> list[str]:
    names = ("dry_run", "check_only", "allow_unsharded", "show_all", "as_json", "follow", "live")
    flags = dict.fromkeys(names, False)
    request = LaunchRequest(loaded=None, target=target, overrides=(), **flags)
    return request.words(program, config, overrides=("launch.env.A=$B c",) if config else ())


def test_command_gives_every_word_back_and_keeps_a_script_like_an_option_apart():
    words = words_of(["fsdplaunch"])
    assert words[:6] == ["fsdplaunch", "launch", "--config", "a config.yaml", "--set", "launch.env.A=$B c"]
    assert words[6:] == [SCRIPT, *ODD]
    assert words_of(["f"], LaunchTarget(name="-x.py"), config=None) == ["f", "launch", "--", "-x.py"]


def written(tmp_path: Path, config: Config, words: list[str], folder: Path | None = None) -> Path:
    """The batch script, in a file."""
    file = tmp_path / "job.sbatch"
    run_dir = tmp_path / "runs dir" / "r1"
    file.write_text(batch_script(config, words, run_id="r1", run_dir=run_dir, folder=folder or tmp_path))
    return file


def run_script(file: Path, *, code: int = 0, **env: str) -> tuple[int, dict]:
    """Run a batch script in bash with srun and scontrol that only write down what they got."""
    programs = file.parent / "bin"
    programs.mkdir()
    note = (
        "import json, os, sys; json.dump({{'words': sys.argv[1:], 'cwd': os.getcwd(), 'env': dict(os.environ)}}, "
    )
    for name, status in (("srun", code), ("scontrol", 1)):
        text = note.format() + f"open({str(file.parent / (name + '.json'))!r}, 'w')); sys.exit({status})"
        (programs / name).write_text(f"#!{sys.executable}\n{text}\n")
        (programs / name).chmod(0o755)
    environ = {"PATH": f"{programs}:{os.environ['PATH']}", "SLURM_JOB_ID": "7"} | env
    done = subprocess.run(["bash", str(file)], env=environ, capture_output=True, text=True, timeout=30)
    return done.returncode, json.loads((file.parent / "srun.json").read_text())


def test_batch_script_hands_every_word_to_srun(tmp_path: Path):
    folder = tmp_path / "an 'odd' $(touch evaluated) folder"
    folder.mkdir()
    words = words_of([sys.executable, "-m", "fsdplaunch"])
    status, got = run_script(written(tmp_path, Config(), words, folder))
    assert status == 0
    assert got["words"] == ["--ntasks-per-node=1", "--kill-on-bad-exit=0", "--wait=60", *words]
    assert got["cwd"] == str(folder)
    assert got["env"]["FSDPLAUNCH_GROUP_RUN"] == "r1/try0"
    assert not list(tmp_path.rglob("evaluated"))


def test_batch_script_names_its_part_and_hands_on_the_cpus(tmp_path: Path):
    env = {"SLURM_RESTART_COUNT": "2", "SLURM_CPUS_PER_TASK": "12"}
    env |= {"SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "5"}
    _, got = run_script(written(tmp_path, Config(), ["true"]), code=75, **env)
    assert got["env"]["FSDPLAUNCH_GROUP_RUN"] == "r1/task5/try2"
    assert got["env"]["SRUN_CPUS_PER_TASK"] == "12"
    asked = json.loads((tmp_path / "scontrol.json").read_text())["words"]
    assert asked == ["requeue", "7_5"]  # 7 is this task's own number, and the whole array's


@pytest.mark.parametrize(
    ("code", "requeue", "lost", "asked"),
    [
        (75, True, None, "requeue"),
        (75, False, None, None),
        (0, True, None, None),
        (3, True, "try0", "requeue"),
        (3, True, "try0/node1", "requeue"),
        (3, True, "other", "show"),  # whether the job was preempted
    ],
)
def test_batch_script_goes_back_into_the_queue_after_saving_or_a_lost_node(tmp_path, code, requeue, lost, asked):
    (tmp_path / "runs dir/r1/try0").mkdir(parents=True)
    if lost:
        (tmp_path / "runs dir/r1" / lost).mkdir(exist_ok=True)
        (tmp_path / "runs dir/r1" / lost / "lost").write_text("lost host1\n")
    file = written(tmp_path, Config(slurm=SlurmSection(requeue=requeue)), ["true"])
    status, _ = run_script(file, code=code)
    assert status == code
    words = tmp_path / "scontrol.json"
    assert (json.loads(words.read_text())["words"][0] if words.exists() else None) == asked


def test_batch_script_asks_for_what_the_section_says(tmp_path: Path):
    slurm = SlurmSection(
        partition="gpu",
        account="a1",
        qos="high",
        time="1-00:00:00",
        gpus_per_node="h100:8",
        cpus_per_task=96,
        mem="200G",
        constraint="[rack1|rack2]",
        array="0-3%2",
        signal_seconds=60,
        container_image="nvcr.io#nvidia/pytorch:25.01",
        container_mounts=("/data:/data", "/a b:/c"),
        modules=("cuda/12.8",),
        setup=("ulimit -l unlimited",),
        lines=("--exclusive", "#SBATCH --mail-type=END"),
    )
    text = written(tmp_path, Config(slurm=slurm, num_machines=4), ["true"]).read_text()
    lines = [line.removeprefix("#SBATCH ") for line in text.splitlines() if line.startswith("#SBATCH")]
    assert set(lines) >= {
        *("--nodes=4", "--ntasks-per-node=1", "--partition=gpu", "--account=a1", "--qos=high"),
        "--time=1-00:00:00",
        *("--gpus-per-node=h100:8", "--cpus-per-task=96", "--mem=200G", "--constraint=[rack1|rack2]"),
        *("--array=0-3%2", "--signal=B:USR1@60", "--requeue", "--exclusive", "--mail-type=END"),
        f'--output="{tmp_path}/runs dir/r1/slurm-%A_%a.out"',
    }
    assert "module load cuda/12.8 || exit 1\nulimit -l unlimited\n" in text
    assert "'--container-image=nvcr.io#nvidia/pytorch:25.01' '--container-mounts=/data:/data,/a b:/c'" in text


@pytest.mark.parametrize(
    ("slurm", "said"),
    [
        (SlurmSection(partition="a\nb"), r"--partition='a.nb' cannot be given to sbatch"),
        (SlurmSection(lines=("--a\n--b",)), r"slurm\.lines"),
    ],
)
def test_line_break_in_an_option_is_refused(tmp_path: Path, slurm: SlurmSection, said: str):
    with pytest.raises(UsageError, match=said):
        written(tmp_path, Config(slurm=slurm), ["true"])


def test_ssh_command_holds_nothing_of_the_run():
    words = client_words(
        "host1", SshSection(options=("-p", "22")), python="/opt/a b/python", module_path=None, silence=10
    )
    assert words[-3:] == ["--", "host1", "exec '/opt/a b/python' -P -m fsdplaunch.cli.ssh_remote"]
    assert "-oBatchMode=yes" in words
    assert "StrictHostKeyChecking" not in " ".join(words)
    section = SshSection(options=("-oServerAliveInterval=60",))
    words = client_words("host1", section, python="python", module_path=None, silence=30)
    own = next(word for word in words if word.startswith("-oServerAliveInterval"))
    assert own == "-oServerAliveInterval=60"  # of two, ssh takes the first
    assert {"-oServerAliveInterval=10", "-oServerAliveCountMax=3"} <= set(words)


def test_node_without_ssh_is_told_so(monkeypatch):
    monkeypatch.setenv("PATH", "")
    with pytest.raises(MachineError, match="this node has no ssh"):
        check_client()


def test_hostfile_is_read_with_its_slots(tmp_path: Path):
    file = tmp_path / "hosts"
    file.write_text("# all\n\nnode1 slots=8\nme@10.0.0.2  # the other\n")
    hosts = read_hosts(SshSection(hostfile=str(file)))
    assert [(host.name, host.slots) for host in hosts] == [("node1", 8), ("me@10.0.0.2", None)]


@pytest.mark.parametrize(
    ("status", "ready", "said", "words"),
    [
        (255, False, ["me@h: Permission denied (publickey)."], "Permission denied (publickey)"),
        (127, False, ["sh: 1: exec: /x/python: not found"], "did not start: sh: 1: exec: /x/python: not found"),
        (255, True, ["client_loop: send disconnect: Broken pipe"], "the connection was lost"),
    ],
)
def test_end_of_a_client_is_explained(status, ready, said, words):
    why, hint = explain_end(status, was_ready=ready, lines=said, python="/x/python")
    assert words in why
    assert hint


STEP = {
    "SLURM_JOB_ID": "12",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_JOB_NUM_NODES": "4",
    "SLURM_NODEID": "1",
    "SLURM_NTASKS": "2",
    "SLURM_STEP_NODELIST": "n1,n2",
}
POD = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "JOB_COMPLETION_INDEX": "1"}


@pytest.mark.parametrize(
    ("environ", "rank"),
    [
        (STEP, 1),
        (POD, 1),
        ({"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_SIZE": "1", "OMPI_COMM_WORLD_RANK": "1"}, 1),
        ({"PMI_SIZE": "2", "PMI_RANK": "1", "MPI_LOCALNRANKS": "1"}, 1),
        ({"FSDPLAUNCH_NODE_RANK": "1"}, 1),
        (STEP | {"FSDPLAUNCH_NODE_RANK": "0"}, 0),
        ({}, None),
    ],
    ids=["slurm", "kubernetes", "open-mpi", "mpich", "variable", "variable-first", "none"],
)
def test_number_of_a_node_comes_from_whoever_knows_it(monkeypatch, environ, rank):
    monkeypatch.setenv("PATH", "")  # no scontrol
    place = find_placement(Config(num_machines=2, main_process_ip="n1"), environ)
    assert (place.rank, place.least, place.host) == (rank, 2, "n1")
    configured = Config(num_machines=2, machine_rank=0, main_process_ip="n1")  # which goes before the scheduler
    assert find_placement(configured, STEP).rank == 0


def test_inside_a_step_nothing_need_be_configured(monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert assumed_settings(STEP) == ("num_machines=2",)
    place = find_placement(Config(num_machines=2), STEP)
    assert (place.rank, place.host, place.port, place.names) == (1, "n1", 20240, ("n1", "n2"))


@pytest.mark.parametrize(
    ("config", "environ", "said"),
    [
        (Config(num_machines=3), STEP, "asks for 3 nodes, but SLURM has 2"),
        (Config(launch=LaunchSection(nodes="3:4")), STEP, "asks for 3 to 4 nodes, but SLURM has 2"),
        (Config(num_machines=2), STEP | {"SLURM_NTASKS": "8", "SLURM_JOB_NUM_NODES": "2"}, "started 4 launchers"),
        (Config(num_machines=2, machine_rank=1), {}, "nothing says where node 0 is"),
        (Config(num_machines=2), {"FSDPLAUNCH_NODE_RANK": "2"}, "this is node 2, but there are 2"),
        (Config(num_machines=2), {"FSDPLAUNCH_NODE_RANK": ""}, "NODE_RANK is '', which is not a node's rank"),
        (Config(num_machines=2, main_process_ip="n1"), POD | {"JOB_COMPLETION_INDEX": "3"}, "this is node 3"),
    ],
)
def test_place_that_cannot_be_is_refused(monkeypatch, config, environ, said):
    monkeypatch.setenv("PATH", "")
    with pytest.raises(UsageError, match=said):
        find_placement(config, environ)
