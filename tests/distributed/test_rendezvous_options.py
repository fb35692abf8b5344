"""What the configuration says about machines reaches torch's agent: read back from torchrun's own parser."""

from pathlib import Path

import pytest

from fsdplaunch.agent.elastic_agent import read_options
from fsdplaunch.agent.main import split
from fsdplaunch.config.resolve import resolve
from fsdplaunch.config.schema.config import Config, LaunchSection
from fsdplaunch.launch.plan import LaunchTarget, NodeFacts, build_plan

SAID = LaunchSection(
    max_restarts=3,
    monitor_interval_seconds=0.25,
    role="trainer",
    rendezvous_id="job-7",
    rendezvous_endpoint="10.0.0.1:4711",
    rendezvous_options={"read_timeout": "20", "last_call_timeout": "4"},
    rendezvous_timeout_seconds=90.0,
    local_address="10.0.0.2",
    workers_per_node=4,
)


def torchs(config):
    """The plan's options as torch's LaunchConfig."""
    machine = NodeFacts(cpus=8, environ={})
    plan = build_plan(
        resolve(config), node=machine, target=LaunchTarget(name="t.py"), run_id="r1", run_dir=Path("/runs/r1")
    )
    return read_options(split(plan.argv[3:])[0])


def test_every_option_reaches_torchs_configuration():
    config = torchs(Config(num_machines=2, machine_rank=1, launch=SAID))
    assert (config.min_nodes, config.max_nodes, config.nproc_per_node) == (2, 2, 4)
    assert (config.max_restarts, config.monitor_interval, config.role) == (3, 0.25, "trainer")
    assert (config.run_id, config.rdzv_backend, config.rdzv_endpoint) == ("job-7", "c10d", "10.0.0.1:4711")
    assert config.local_addr == "10.0.0.2"
    said = {"is_host": "0", "join_timeout": "90", "read_timeout": "20", "last_call_timeout": "4"}
    assert said.items() <= config.rdzv_configs.items()


@pytest.mark.parametrize("variable", ["PET_STANDALONE", "PET_NNODES", "PET_MODULE"])
def test_variables_for_a_bare_torchrun_do_not_change_a_plan(monkeypatch, variable):
    before = torchs(Config(launch=SAID))
    monkeypatch.setenv(variable, "1")
    after = torchs(Config(launch=SAID))
    assert (after.rdzv_endpoint, after.run_id, after.min_nodes) == (
        before.rdzv_endpoint,
        before.run_id,
        before.min_nodes,
    )
