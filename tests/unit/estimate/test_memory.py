"""The arithmetic: parts sum up, more ranks never need more on each, offload never raises GPU memory."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fsdplaunch.config.load import stack
from fsdplaunch.config.yaml_text import YamlText
from fsdplaunch.errors import UsageError
from fsdplaunch.estimate.memory import (
    MemoryCase,
    TrainingSetup,
    activations_of,
    alternatives,
    memory_need,
    ranks_of,
    training_setup,
    verdict_of,
)
from fsdplaunch.estimate.model import describe
from fsdplaunch.estimate.report import changes, fewest_ranks, largest_batch, make_report, resized, row_data
from fsdplaunch.probe.memory_plan import STATES

GIB = 1024**3


def case_of(layers=4, hidden=256, vocab=1000, heads=8) -> MemoryCase:
    config = {
        "model_type": "llama", "hidden_size": hidden, "intermediate_size": 3 * hidden,
        "num_attention_heads": heads,
        "num_hidden_layers": layers, "vocab_size": vocab, "dtype": "bfloat16",
    }  # fmt: skip
    described = describe(config, source="test")
    return MemoryCase(sizes=described.sizes, shape=described.shape)


cases = st.builds(
    case_of,
    layers=st.integers(1, 8),
    hidden=st.sampled_from([64, 96, 256]),
    vocab=st.sampled_from([100, 1000, 50_000]),
)


@st.composite
def setups(draw):
    per_node = draw(st.sampled_from([1, 2, 4, 8]))
    world = per_node * draw(st.integers(1, 8))
    strategy = draw(st.sampled_from(["FULL_SHARD", "SHARD_GRAD_OP", "HYBRID_SHARD", "NO_SHARD"]))
    shards = {"HYBRID_SHARD": per_node, "NO_SHARD": 1}.get(strategy, world)
    return TrainingSetup(
        strategy=strategy,
        world=world,
        per_node=per_node,
        shards=shards,
        keeps=int(strategy == "SHARD_GRAD_OP"),
        version=draw(st.sampled_from([1, 2])),
        master=draw(st.sampled_from([0, 4])),
        compute=draw(st.sampled_from([0, 2])),
        reduce=draw(st.sampled_from([0, 4])),
        offload=draw(st.booleans()),
        checkpointing=draw(st.booleans()),
        optimizer=draw(st.sampled_from(sorted(STATES))),
        wrap=draw(st.sampled_from(["TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP"])),
        smallest=draw(st.sampled_from([10_000, 100_000_000])),
        batch_size=draw(st.integers(1, 8)),
        length=draw(st.sampled_from([16, 128])),
    )


def kept(need) -> int:
    """What lies on the GPU for the whole run, and gradients: in the moment when all are there."""
    return max(parts["parameters"] + parts["gradients"] + parts["optimizer"] for parts in need.moments.values())


@settings(max_examples=50, deadline=None)
@given(cases, setups())
def test_parts_sum_to_the_total(case, setup):
    data = row_data(make_report(case, setup, title="", model="", memory=GIB).rows[0])
    assert sum(data["parts"].values()) == data["allocated"]
    assert data["allocated"] + data["context"] == data["gpu"]
    assert data["allocated"] == max(data["moments"].values())


@settings(max_examples=50, deadline=None)
@given(cases, setups(), st.integers(2, 5))
def test_more_ranks_never_need_more_on_each(case, setup, times):
    more = replace(setup, world=setup.world * times, shards=setup.shards * times)
    assert kept(case.need(more)) <= kept(case.need(setup))
    assert case.need(more).gpu <= case.need(setup).gpu


@settings(max_examples=50, deadline=None)
@given(cases, setups())
def test_offload_never_raises_gpu_memory_and_moves_the_rest_to_the_host(case, setup):
    here, there = case.need(replace(setup, offload=False)), case.need(replace(setup, offload=True))
    assert kept(there) == 0
    assert there.host >= kept(here)
    assert there.gpu <= here.gpu


@settings(max_examples=50, deadline=None)
@given(cases, setups())
def test_larger_batches_need_more_and_checkpointing_less(case, setup):
    assert case.need(replace(setup, batch_size=setup.batch_size + 1)).gpu >= case.need(setup).gpu
    off, on = (case.need(replace(setup, checkpointing=flag)) for flag in (False, True))
    assert on.moments["loss"]["activations"] <= off.moments["loss"]["activations"]


@settings(max_examples=25, deadline=None)
@given(cases, setups(), st.integers(1, 200))
def test_answers_are_the_edge_of_what_fits(case, setup, mebibytes):
    setup = replace(setup, offload=False)
    memory = memory_need(case.sizes, case.shape, setup).context + mebibytes * 1024**2
    batch = largest_batch(case, setup, memory)
    fits = [
        verdict_of(case.need(replace(setup, batch_size=size)).gpu, memory) == "fits"
        for size in (batch or 1, batch + 1)
    ]
    assert fits == [batch > 0, False]
    ranks = fewest_ranks(case, setup, memory)
    if ranks is not None and ranks > 1 and setup.strategy in ("FULL_SHARD", "SHARD_GRAD_OP"):
        below = ranks - (1 if ranks <= setup.per_node else setup.per_node)
        for count, expected in ((ranks, "fits"), (below, None)):
            spread = replace(setup, world=count, shards=count, per_node=min(count, setup.per_node))
            verdict = verdict_of(case.need(spread).gpu, memory)
            assert (verdict == "fits") == (expected == "fits")


@settings(max_examples=40, deadline=None)
@given(cases, setups())
def test_every_change_saves_what_it_says(case, setup):
    now = case.need(setup).gpu
    for change in changes(case, setup):
        assert change.saves == now - change.need.gpu > 0
        assert change.need.gpu == case.need(change.need.setup).gpu


def test_full_shard_keeps_sixteen_bytes_per_parameter_in_all():
    case = case_of()
    setup = TrainingSetup(strategy="FULL_SHARD", world=4, per_node=4, shards=4, master=4, compute=2, reduce=4)
    assert kept(case.need(setup)) == 16 * case.sizes.parameters // 4
    assert case.need(setup).checkpoint == 12 * case.sizes.parameters


def test_strategies_of_the_table_differ_from_yours_and_each_other():
    yours = TrainingSetup(strategy="FULL_SHARD", world=16, per_node=8, shards=16)
    found = [(each.strategy, each.shards, each.keeps, each.offload) for each in alternatives(yours)]
    assert found == [
        ("SHARD_GRAD_OP", 16, 1, False),
        ("HYBRID_SHARD", 8, 0, False),
        ("HYBRID_SHARD_ZERO2", 8, 1, False),
        ("NO_SHARD", 1, 0, False),
        ("FULL_SHARD", 16, 0, True),
    ]


def loaded(*overrides):
    return stack(YamlText("test"), overrides=overrides).config


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["fsdp_sharding_strategy=FULL_SHARD"], (16, 0)),
        (["fsdp_reshard_after_forward=false"], (16, 1)),
        (["fsdp_reshard_after_forward=8"], (16, 8)),
        (["fsdp_sharding_strategy=NO_SHARD"], (1, 0)),
        (["fsdp_version=1", "fsdp_sharding_strategy=HYBRID_SHARD_ZERO2", "num_machines=2"], (8, 1)),
        (["parallelism_config.dp_shard_size=4", "parallelism_config.dp_replicate_size=-1"], (4, 0)),
    ],
)
def test_setup_follows_the_configuration(overrides, expected):
    fixed = [item.replace("config.dp", "config.parallelism_config_dp") for item in overrides]
    setup = training_setup(
        loaded(*fixed), world=16, per_node=8, batch_size=1, length=8, optimizer="adamw", on_gpu=True
    )
    assert (setup.shards, setup.keeps) == expected


def test_mixed_precision_decides_the_widths():
    setup = training_setup(
        loaded("mixed_precision=bf16"), world=2, per_node=2, batch_size=1, length=8, optimizer="adamw", on_gpu=True
    )
    assert setup.widths(case_of().sizes) == (4, 2, 4)
    plain = training_setup(loaded(), world=2, per_node=2, batch_size=1, length=8, optimizer="adamw", on_gpu=True)
    assert plain.widths(case_of().sizes) == (2, 2, 2)


def test_unknown_optimizer_is_refused_with_the_known_ones():
    with pytest.raises(UsageError, match="'adamx' is not known") as refused:
        training_setup(loaded(), world=2, per_node=2, batch_size=1, length=8, optimizer="adamx", on_gpu=True)
    assert "adamw" in str(refused.value.hint)


@pytest.mark.parametrize(
    ("given", "gpus", "expected"),
    [(None, 8, (8, 8)), (64, 8, (64, 8)), (None, 0, (2, 2)), (12, 8, (12, 6)), (6, 0, (6, 6))],
)
def test_ranks_come_from_the_command_line_then_the_file_then_the_machine(given, gpus, expected):
    assert ranks_of(loaded(), gpus=gpus, given=given) == expected


def test_resized_run_keeps_its_way_to_shard():
    inside = TrainingSetup(strategy="HYBRID_SHARD", world=16, per_node=8, shards=8)
    assert (resized(inside, 32).shards, resized(inside, 32).replicas) == (8, 4)
    spread = TrainingSetup(strategy="FULL_SHARD", world=16, per_node=8, shards=16)
    assert resized(spread, 32).shards == 32


def test_ranks_that_split_layers_and_sequences_need_less_for_each() -> None:
    case = case_of(layers=8, hidden=256, heads=8)
    plain = TrainingSetup(strategy="FULL_SHARD", world=8, per_node=8, shards=8, length=1024)
    layers = replace(plain, shards=4, tensor=2)
    sequences = replace(plain, context=2)
    one, two, cut = (memory_need(case.sizes, case.shape, each) for each in (plain, layers, sequences))
    assert two.moments["backward"]["gathered"] == pytest.approx(one.moments["backward"]["gathered"] / 2, rel=0.01)
    assert kept(two) == pytest.approx(kept(one), rel=0.01)
    assert cut.moments["loss"]["gathered"] == one.moments["loss"]["gathered"]
    blocks = one.moments["loss"]["activations"] - cut.moments["loss"]["activations"]
    assert 2 * blocks == pytest.approx(one.moments["loss"]["activations"], rel=0.2)
    assert (layers.replicas, layers.spread) == (1, 4)
    uneven = replace(plain, world=9, shards=9, context=3, attention="heads")
    notes = make_report(case, uneven, title="", model="", memory=GIB).notes
    assert any("cp_size 3 does not divide the model's 8 heads" in note for note in notes)
    notes = make_report(case, replace(layers, world=9, shards=3, tensor=3), title="", model="", memory=GIB).notes
    assert any("tp_size 3 does not divide the model's 8 heads" in note for note in notes)
    names = [row.name for row in make_report(case, layers, title="", model="", memory=GIB).rows]
    assert names[0] == "FULL_SHARD, layers over 2"


MEASURED = {
    (2, 4, "heads", False): 1054720,
    (2, 4, "ring", False): 989184,
    (4, 4, "heads", False): 560128,
    (4, 4, "ring", False): 494592,
    (4, 6, "auto", False): 626688,
    (4, 4, "ring", True): 32768,
    (4, 4, "heads", True): 32768,
}
"""By ranks, heads, way and recomputing: the bytes that one more block of a Llama keeps, in fp32.

512 positions, heads of 16 of which two are of keys: autograd's saved tensors.
"""


@pytest.mark.parametrize(("ranks", "heads", "way", "again"), MEASURED)
def test_attention_over_split_sequences_keeps_what_was_measured(ranks, heads, way, again) -> None:
    config = {
        "model_type": "llama", "hidden_size": 16 * heads, "intermediate_size": 96, "num_attention_heads": heads,
        "num_key_value_heads": 2, "num_hidden_layers": 1, "vocab_size": 96, "head_dim": 16,
    }  # fmt: skip
    shape = describe(config, source="test").shape
    setup = TrainingSetup(
        strategy="FULL_SHARD", world=ranks, per_node=ranks, shards=ranks, context=ranks, attention=way, length=512,
        checkpointing=again,
    )  # fmt: skip
    acts = activations_of(shape, setup, 4)
    block = acts.kept - 512 * 16 * heads * 4
    assert block == pytest.approx(MEASURED[ranks, heads, way, again], rel=0.02)
