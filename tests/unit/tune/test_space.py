"""Candidates come from the schema, each run once; `--try` is read and refused as the schema says."""

from dataclasses import replace

import pytest

from fsdplaunch.config.schema.config import all_keys, keys_by_path
from fsdplaunch.errors import UsageError
from fsdplaunch.tune.space import Candidate, Space, identity, read_tries
from tests.yaml_config import config_of

RESHARD = ("fsdp_config", "fsdp_reshard_after_forward")
OFFLOAD = ("fsdp_config", "fsdp_offload_params")


def space_of(text="", **values):
    return Space(
        **{"read": lambda overrides: config_of(*overrides, text=text), "world": 2, "on_gpu": False, **values}
    )


def labels(space):
    return [candidate.label for candidate in space.singles()]


def test_fsdp2_on_two_workers():
    assert labels(space_of()) == [
        "reshard_after_forward=false",
        "auto_wrap_policy=NO_WRAP",
        "min_num_params=1000000",
        "min_num_params=10000000",
        "min_num_params=100000000",
        "forward_prefetch=true",
        "activation_checkpointing=true",
        "dp_replicate_size=2",
        "checkpoint_every=2",
        "checkpoint_every=4",
    ]


def test_fsdp1_has_strategies_and_backward_prefetch_instead():
    found = labels(space_of("fsdp_config:\n  fsdp_version: 1\n"))
    assert "sharding_strategy=SHARD_GRAD_OP" in found
    assert "backward_prefetch=NO_PREFETCH" in found
    assert not any(label.startswith(("reshard", "dp_replicate")) for label in found)


def test_groups_and_replicas_divide_the_workers():
    found = labels(space_of(world=8))
    assert [label for label in found if label.startswith("reshard")] == [
        "reshard_after_forward=false",
        "reshard_after_forward=2",
        "reshard_after_forward=4",
    ]
    assert [label for label in found if label.startswith("dp_")] == [f"dp_replicate_size={n}" for n in (2, 4, 8)]


def test_what_a_strategy_says_gives_way_to_the_key_that_says_the_same():
    space = space_of("fsdp_config:\n  fsdp_version: 2\n  fsdp_sharding_strategy: FULL_SHARD\n")
    (keeps,) = [candidate for candidate in space.singles() if candidate.changes == ((RESHARD, False),)]
    config = space.config(keeps)
    assert config.fsdp_config.fsdp_reshard_after_forward is False
    assert config.fsdp_config.fsdp_sharding_strategy == "SHARD_GRAD_OP"


def test_keys_without_effect_make_no_run_of_their_own():
    space = space_of()
    whole, prefetch = ("fsdp_config.fsdp_auto_wrap_policy=NO_WRAP", "fsdp_config.fsdp_forward_prefetch=true")
    assert identity(space.read([whole]), 2) == identity(space.read([whole, prefetch]), 2)
    replicas = "parallelism_config.parallelism_config_dp_replicate_size=2"
    kept = "fsdp_reshard_after_forward=false"
    assert identity(space.read([replicas]), 2) == identity(space.read([replicas, kept]), 2)
    assert identity(space.read([]), 2) != identity(space.read([kept]), 2)


def test_dtypes_compiling_and_offloading_are_asked_for():
    assert not any(label.startswith(("mixed", "backend")) for label in labels(space_of()))
    wide = labels(space_of(allowed=frozenset({"precision", "compile"})))
    assert {"mixed_precision=bf16", "backend=INDUCTOR", "use_regional_compilation=true"} <= set(wide)
    assert space_of().last_resorts() == []
    assert [each.changes for each in space_of(on_gpu=True).last_resorts()] == [((OFFLOAD, True),)]


def test_a_key_declares_itself_tunable_in_one_place():
    """Every declaration names keys that exist and values of the key's kind."""
    for spec in (spec for spec in all_keys() if spec.key.tunable):
        tunable = spec.key.tunable
        assert [spec.key.kind.parse(value) for value in tunable.values] == list(tunable.values)
        for name, values in {**tunable.needs, **tunable.idle, **dict.fromkeys(tunable.follow, ())}.items():
            other = keys_by_path()[tuple(name.split("."))]
            assert [other.key.kind.parse(value) for value in values] == list(values)


def test_tries_replace_the_list():
    tries = read_tries(["fsdp_reshard_after_forward=true,no", "sharding.checkpoint_every=3"])
    assert tries == {RESHARD: [True, False], ("sharding", "checkpoint_every"): [3]}
    assert labels(space_of(tries=tries)) == ["reshard_after_forward=false", "checkpoint_every=3"]


@pytest.mark.parametrize(
    ("texts", "words"),
    [
        (["fsdp_reshard_after_forward"], "is not KEY=VALUE"),
        (["fsdp_reshard_after_forward="], "fsdp_config.fsdp_reshard_after_forward has no value"),
        (["mixed_precision=bf16,"], "mixed_precision has no value"),
        (["num_processes=2,4"], "num_processes does not decide how a step is computed"),
        (["nonsense=1", "mixed_precision=bf17"], "nonsense is not a key; mixed_precision must be one of"),
    ],
)
def test_wrong_tries_are_one_message(texts, words):
    with pytest.raises(UsageError, match="--try") as caught:
        read_tries(texts)
    assert words in caught.value.message


def test_overrides_give_the_candidate_again():
    space = space_of(world=4)
    for candidate in space.singles():
        config = space.config(candidate)
        assert config is not None
        for path, value in candidate.changes:
            assert getattr(getattr(config, path[0]), path[1]) == value
    assert Candidate().label == "yours"
    every, checkpointing = ("sharding", "checkpoint_every"), ("fsdp_config", "fsdp_activation_checkpointing")
    assert Candidate(((checkpointing, True), (every, 2))).label == "checkpoint_every=2"  # without what it needs
    assert replace(space, world=3).config(Candidate(((("fsdp_config", "fsdp_version"), 7),))) is None
