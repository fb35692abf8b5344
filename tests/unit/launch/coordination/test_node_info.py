"""What keeps nodes from running together."""

from dataclasses import replace

import pytest

from fsdplaunch.config.resolve import resolve
from fsdplaunch.config.schema.config import Config, LaunchSection
from fsdplaunch.launch.coordination.join import config_texts
from fsdplaunch.launch.coordination.node_info import NodeInfo, assign_ranks, find_incompatibilities, unreachable

VERSIONS = {"fsdplaunch": "0.1.0", "torch": "2.13", "python": "3.11"}
ONE = NodeInfo(host="a", address="10.0.0.1", versions=VERSIONS, command=("t.py",), script="1")
TWO = replace(ONE, host="b", address="10.0.0.2")


def said(*machines: NodeInfo, most: int = 2, fatal: bool = True) -> list[str]:
    return [
        incompatibility.message
        for incompatibility in find_incompatibilities(machines, most=most)
        if incompatibility.fatal is fatal
    ]


def test_nodes_that_agree_have_no_troubles():
    assert find_incompatibilities([ONE, TWO], most=2) == []


@pytest.mark.parametrize(
    ("asked", "given"),
    [
        ([None, None, None], [0, 1, 2]),
        ([0, None, 1], [0, 2, 1]),
        ([0, 2, None], [0, 2, 1]),
        ([0, 2, 1], [0, 2, 1]),
    ],
)
def test_ranks_are_those_asked_for_and_else_the_lowest_free(asked, given):
    assert assign_ranks([replace(ONE, rank=rank) for rank in asked]) == given


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"versions": VERSIONS | {"torch": "2.12"}}, "torch is 2.12 on b (10.0.0.2) and 2.13 on a (10.0.0.1)"),
        ({"versions": VERSIONS | {"fsdplaunch": ""}}, "fsdplaunch is missing on b (10.0.0.2)"),
        ({"command": ("t.py", "--x")}, "b (10.0.0.2) would run t.py --x, and a t.py"),
        ({"config": {"use_cpu": "true"}}, "another configuration: use_cpu is 'true' there and left out on a"),
        ({"workers": 0}, "b (10.0.0.2) would start no workers"),
        ({"obstacles": ("t.py cannot be read\nsee it",)}, "b (10.0.0.2) cannot start: t.py cannot be read"),
        ({"rank": 5}, "b (10.0.0.2) is configured as node 5, but there are 2"),
    ],
)
def test_difference_is_named_with_both_values(change, message):
    (incompatibility,) = said(ONE, replace(TWO, **change))
    assert message in incompatibility


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"versions": VERSIONS | {"python": "3.12"}}, "python is 3.12 on b"),
        ({"script": "2"}, "the script on b (10.0.0.2) differs from that on a"),
    ],
)
def test_difference_that_may_be_meant_is_only_said(change, message):
    other = replace(TWO, **change)
    assert said(ONE, other) == []
    assert message in said(ONE, other, fatal=False)[0]


def test_many_differing_keys_are_counted():
    (incompatibility,) = said(ONE, replace(TWO, config={f"k{n}": "1" for n in range(5)}))
    assert "and 2 more keys differ" in incompatibility


def test_values_of_variables_are_compared_but_never_shown():
    texts = config_texts(resolve(Config(launch=LaunchSection(env={"WHERE": "secret"}))))
    assert "secret" not in "".join(texts.values())
    other = config_texts(resolve(Config(launch=LaunchSection(env={"WHERE": "other"}))))
    assert texts["launch.env.WHERE"] != other["launch.env.WHERE"]


def test_what_belongs_to_one_node_is_not_compared():
    texts = config_texts(
        resolve(Config(machine_rank=1, gpu_ids="0", launch=LaunchSection(local_address="10.0.0.2")))
    )
    assert texts == config_texts(resolve(Config()))


def test_node_that_cannot_be_reached_is_named_by_the_one_that_tried():
    (one, two) = unreachable({"a": ("b", "no route to host"), "b": ("c", ""), "c": ("a", None)})
    assert one.message == "a cannot reach b: no route to host"
    assert two.message == "c stopped answering"
