"""One node's part of a run on several: what the nodes agreed on becomes this node's plan."""

from pathlib import Path

import pytest

from fsdplaunch.config.resolve import resolve
from fsdplaunch.config.schema.config import Config, LaunchSection
from fsdplaunch.errors import MachineError
from fsdplaunch.launch.coordination import join
from fsdplaunch.launch.coordination.join import agreed_config, provisional_config
from fsdplaunch.launch.coordination.network import interface_variables
from fsdplaunch.launch.coordination.placement import find_placement
from fsdplaunch.launch.coordination.run_control import RunAssignment
from fsdplaunch.launch.coordination.secret_source import SecretSource
from fsdplaunch.launch.plan import LaunchTarget, NodeFacts, build_plan
from fsdplaunch.run_dir import node_folder


@pytest.mark.parametrize(
    ("rank", "address", "folder", "gpus"), [(0, "10.0.0.10", "/runs/r7", 4), (1, "10.0.0.2", "/runs/r7/node1", 2)]
)
def test_torch_is_told_everything_and_starts_a_worker_for_each_gpu(rank, address, folder, gpus):
    names, store = ("a (10.0.0.10)", "b (10.0.0.2)"), "10.0.0.10:29501"
    agreed = RunAssignment(run_id="r7", rank=rank, names=names, nodes=2, world=6, store=store, address=address)
    launch = LaunchSection(workers_per_node="auto", max_restarts=1)
    plan = build_plan(
        agreed_config(resolve(Config(num_machines=2, launch=launch)), agreed),
        node=NodeFacts(gpus=list(map(str, range(gpus))), cpus=8, python="/usr/bin/python3", environ={}),
        target=LaunchTarget(name="t.py"),
        run_id="r7",
        run_dir=node_folder(Path("/runs/r7"), rank),
        ranks=6,
    )
    assert (plan.workers, plan.nodes, plan.world_size) == (gpus, 2, 6)
    told = {"--rdzv-backend=c10d", "--rdzv-id=r7", f"--rdzv-endpoint={store}", f"--local-addr={address}"}
    assert told | {f"--log-dir={folder}", f"--nproc-per-node={gpus}"} <= set(plan.argv)
    assert f"is_host={1 - rank}" in next(word for word in plan.argv if word.startswith("--rdzv-conf="))
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
        (LaunchSection(local_address="192.0.2.77"), r"local_address is 192.0.2.77, which this node .* not have"),
    ],
)
def test_interface_or_address_of_another_node_is_refused(launch, said):
    with pytest.raises(MachineError, match=said):
        join.check_interface(Config(launch=launch))
