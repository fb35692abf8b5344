"""Configuration keys as options of launch."""

import importlib.util
import re
from contextlib import suppress
from pathlib import Path

import pytest

from fsdplaunch.cli.commands import expanded
from fsdplaunch.cli.key_options import expand, keys_by_option, list_options
from fsdplaunch.config.schema.config import all_keys
from fsdplaunch.errors import UsageError

OWN = {"own_flags": {"--dry-run"}, "own_options": {"--config", "-c"}}


def test_every_key_is_an_option_under_its_own_name():
    for name, spec in keys_by_option().items():
        dashed = "--" + name.replace("_", "-")
        assert expand([f"{dashed}=X", "t.py"], **OWN) == ["--set", f"{spec.dotted}=X", "t.py"]
    assert {spec.dotted for spec in all_keys()} <= keys_by_option().keys()


def test_list_of_options_names_every_key_once():
    words = [line.split()[0] for line in list_options().splitlines() if line.startswith("  --")]
    taken = [keys_by_option()[word.removeprefix("--").replace("-", "_")] for word in words]
    assert taken == list(all_keys())


@pytest.mark.parametrize(("words", "value"), [([], "true"), (["false"], "false"), (["true"], "true")])
def test_values_are_taken_from_the_next_word_and_a_flag_may_stand_alone(words, value):
    argv = ["--fsdp_sharding_strategy", "FULL_SHARD", "--use-cpu", *words, "t.py", "--lr", "1"]
    strategy = ["--set", "fsdp_config.fsdp_sharding_strategy=FULL_SHARD"]
    assert expand(argv, **OWN) == [*strategy, "--set", f"use_cpu={value}", "t.py", "--lr", "1"]


def test_two_options_that_set_one_key_otherwise_are_refused():
    with pytest.raises(UsageError, match="--tpu and --use_fsdp contradict each other: each sets distributed_type"):
        expand(["--tpu", "--cpu", "--use_fsdp", "t.py"], **OWN)
    assert expand(["--use_fsdp", "--use-fsdp", "t.py"], **OWN)[-1] == "t.py"


def test_transformers_command_line_is_understood(tmp_path):
    (tmp_path / "fsdp.yaml").write_text("fsdp_version: 1\n")
    argv = ["--fsdp=full shard auto_wrap offload", f"--fsdp_config={tmp_path}", "my-training-script.py"]
    set_by = ("fsdp_sharding_strategy=FULL_SHARD", "fsdp_auto_wrap_policy=", "fsdp_offload_params=true")
    done = [word for one in set_by for word in ("--set", f"fsdp_config.{one}")]
    assert expand(argv, **OWN) == [*done, "--config", str(tmp_path / "fsdp.yaml"), "my-training-script.py"]


def test_launchs_own_options_are_known_from_its_signature():
    argv = ["launch", "--config_file", "--use-cpu", "--dry-run", "--json", "-m", "--num-processes=2", "t"]
    assert expanded(argv) == [*argv[:6], "--set", "num_processes=2", "t"]
    argv = ["check", "--compare", "--steps", "2", "--hide-ranks", "-m", "train", "--hide-ranks", "--noted"]
    assert expanded(argv) == [*argv[:4], "--set", "launch.hide_ranks=true", *argv[5:]]
    argv = ["merge-weights", "--num-processes", "2"]
    assert expanded(argv) == argv


@pytest.mark.parametrize(
    ("written", "assignment"),
    [
        (["--nproc-per-node", "4"], "launch.workers_per_node=4"),
        (["--nnodes=2"], "num_machines=2"),
        (["--nnodes", "1:4"], "launch.nodes=1:4"),
        (["--node_rank", "1"], "machine_rank=1"),
        (["--master-addr", "h"], "main_process_ip=h"),
        (["--master_port=1"], "main_process_port=1"),
        (["--rdzv-endpoint", "h:1"], "launch.rendezvous_endpoint=h:1"),
        (["--rdzv-conf", "a=1,b=2"], "launch.rendezvous_options=a=1,b=2"),
        (["--monitor-interval", "1"], "launch.monitor_interval_seconds=1"),
        (["-r", "3"], "launch.redirects=3"),
        (["-t", "0:1"], "launch.tee=0:1"),
        (["--local-ranks-filter", "0,1"], "launch.show_local_ranks=0,1"),
        (["--signals-to-handle", "SIGTERM"], "launch.signals=SIGTERM"),
        (["--shutdown-timeout", "5"], "launch.shutdown_grace_seconds=5"),
        (["--virtual-local-rank"], "launch.virtual_local_rank=true"),
        (["--standalone"], "num_machines=1"),
        (["--no-preload"], "launch.preload=none"),
        (["--start-method", "spawn"], "launch.preload=none"),
        (["--event-log-handler", "console"], "launch.event_log=console"),
        (["--num_cpu_threads_per_process", "3"], "launch.env.OMP_NUM_THREADS=3"),
        (["--run-path", "--quiet", "-q", "--start-method=fork", "--cpu"], "use_cpu=true"),  # always so
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_torchruns_options_set_keys(written, assignment):
    assert expand([*written, "t.py"], own_flags=set(), own_options=set()) == ["--set", assignment, "t.py"]


@pytest.mark.parametrize("option", ["--logs-specs=x", "--duplicate_stdout_filters"])
def test_option_of_torchrun_without_a_meaning_is_refused_with_what_serves_instead(option):
    with pytest.raises(UsageError, match="is torchrun's, and has no meaning here") as caught:
        expand([option, "a", "t.py"], own_flags=set(), own_options=set())
    assert "ranks/" in caught.value.hint


def test_every_option_of_torchrun_is_known():
    source = Path(importlib.util.find_spec("torch").origin).parent / "distributed" / "run.py"
    options = set(re.findall(r'"(--[a-z][a-z-]+)"', source.read_text(encoding="utf-8")))
    assert len(options) > 25
    others = {"--module", "--no-python", "--local-rank"}  # launch's own; only spoken of
    for option in options - others:
        with suppress(UsageError):  # says more than that there is no such option
            assert expand([f"{option}=1", "t.py"], own_flags=set(), own_options=set()) != [f"{option}=1", "t.py"]


@pytest.mark.parametrize("option", ["--lr", "--batch-size", "--epochs", "--learning_rate"])
def test_an_option_of_the_script_before_it_is_told_where_it_goes(option):
    with pytest.raises(UsageError, match=f"no such option: {option}") as caught:
        expand([option, "3", "train.py"], **OWN)
    assert caught.value.hint == f"the script's own options come after it: fsdplaunch launch train.py {option} ..."
