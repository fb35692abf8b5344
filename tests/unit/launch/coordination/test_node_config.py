"""One node's part of a run on several: what the nodes agreed on becomes this node's plan."""

from pathlib import Path

import pytest

from fsdplaunch.cli import multi_node
from fsdplaunch.config.resolve import resolve
from fsdplaunch.config.schema.config import Config, LaunchSection
from fsdplaunch.errors import MachineError
from fsdplaunch.launch.coordination import join
from fsdplaunch.launch.coordination.join import agreed_config, provisional_config
from fsdplaunch.launch.coordination.network import interface_variables
from fsdplaunch.launch.coordination.placement import NodePlacement, find_placement
from fsdplaunch.launch.coordination.run_control import RunAssignment
from fsdplaunch.launch.coordination.secret_source import SecretSource
from fsdplaunch.launch.plan import LaunchPlan, LaunchTarget, NodeFacts, build_plan
from fsdplaunch.run_dir import node_folder


def assignment(rank: int) -> RunAssignment:
    return RunAssignment(
        run_id="r7",
        rank=rank,
        names=["a (10.0.0.10)", "b (10.0.0.2)"],
        nodes=2,
        world=6,
        store="10.0.0.10:29501",
        address=("10.0.0.10", "10.0.0.2")[rank],
    )


def plan_of(rank: int, launch: LaunchSection, *, gpus: int) -> LaunchPlan:
    config = agreed_config(resolve(Config(num_machines=2, launch=launch)), assignment(rank))
    machine = NodeFacts(gpus=list(map(str, range(gpus))), cpus=8, python="/usr/bin/python3", environ={})
    run_dir = node_folder(Path("/runs/r7"), rank)
    return build_plan(
        config,
        node=machine,
        target=LaunchTarget(name="t.py"),
        run_id="r7",
        run_dir=run_dir,
        ranks=assignment(rank).world,
    )


@pytest.mark.parametrize(("rank", "gpus"), [(0, 4), (1, 2)])
def test_nodes_with_unequal_gpus_start_one_worker_for_each(rank: int, gpus: int):
    plan = plan_of(rank, LaunchSection(workers_per_node="auto"), gpus=gpus)
    assert (plan.workers, plan.nodes, plan.world_size) == (gpus, 2, 6)
    assert f"--nproc-per-node={gpus}" in plan.argv


@pytest.mark.parametrize(
    ("rank", "address", "folder"), [(0, "10.0.0.10", "/runs/r7"), (1, "10.0.0.2", "/runs/r7/node1")]
)
def test_torch_is_told_everything_and_guesses_nothing(rank: int, address: str, folder: str):
    plan = plan_of(rank, LaunchSection(workers_per_node=1, max_restarts=1), gpus=0)
    conf = next(word for word in plan.argv if word.startswith("--rdzv-conf="))
    assert {
        "--rdzv-backend=c10d",
        "--rdzv-id=r7",
        "--rdzv-endpoint=10.0.0.10:29501",
        f"--local-addr={address}",
        f"--log-dir={folder}",
    } <= set(plan.argv)
    assert f"is_host={1 - rank}" in conf
    assert plan.env["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] == "1"


def test_name_that_means_loopback_is_no_address_for_others(monkeypatch):
    monkeypatch.setattr(join.network, "resolve", lambda _host: ["127.0.1.1"])
    mine = node_spec("me")
    assert join.listening_host(mine) == ""  # the others mean another address by that name: all serve
    assert join.own_address(mine) == join.network.own_address() != "127.0.1.1"


def test_nodes_that_all_are_this_machine_meet_where_only_it_can_reach_them():
    mine = node_spec("127.0.0.1")
    assert (join.listening_host(mine), join.own_address(mine)) == ("127.0.0.1", "127.0.0.1")


def node_spec(host: str) -> join.NodeSpec:
    config = Config(num_machines=2, main_process_ip=host, launch=LaunchSection(local_address=None))
    return join.NodeSpec(
        config=config,
        place=find_placement(config, {}),
        target=LaunchTarget(name="t.py"),
        workers=1,
        run_id="r7",
        secret=SecretSource("ab" * 32, Path("/nonexistent")),
    )


@pytest.mark.parametrize(
    ("least", "most", "words"),
    [
        (2, 2, "the other node"),
        (4, 4, "each of the 3 other nodes"),
        (1, 2, "another node"),
        (2, 4, "each of up to 3 other nodes"),
    ],
)
def test_node_0_says_how_many_others_there_may_be(least, most, words):
    assert multi_node.other_nodes(NodePlacement(least=least, most=most)) == words


def test_dry_run_knows_where_the_nodes_will_meet():
    config = Config(num_machines=2, main_process_ip="fe80::1", main_process_port=29600, machine_rank=1)
    before = provisional_config(config, find_placement(config, {}), address="unused")
    assert before.launch.rendezvous_endpoint == "[fe80::1]:29600"
    assert (before.machine_rank, before.main_process_ip, before.main_process_port) == (1, None, None)


@pytest.mark.parametrize(
    ("launch", "environ", "variables"),
    [
        (LaunchSection(), {}, {"GLOO_SOCKET_IFNAME": "lo"}),
        (LaunchSection(), {"GLOO_SOCKET_IFNAME": "eth9"}, {}),
        (LaunchSection(network_interface="ib0"), {}, {"GLOO_SOCKET_IFNAME": "ib0", "NCCL_SOCKET_IFNAME": "ib0"}),
    ],
    ids=["found", "said-by-the-user", "asked-for"],
)
def test_workers_talk_over_the_interface_of_the_nodes(launch, environ, variables):
    assert interface_variables(Config(launch=launch), "127.0.0.1", environ) == variables


@pytest.mark.parametrize(
    ("launch", "said"),
    [
        (LaunchSection(network_interface="ib0"), r"network_interface is ib0, but this node .* has lo \(127"),
        (
            LaunchSection(local_address="192.0.2.77"),
            r"local_address is 192.0.2.77, which this node .* not have",
        ),
    ],
)
def test_interface_or_address_of_another_node_is_refused(launch, said):
    with pytest.raises(MachineError, match=said):
        join.check_interface(Config(launch=launch))
