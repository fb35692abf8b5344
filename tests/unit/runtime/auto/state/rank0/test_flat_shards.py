"""Every rank's part of a flat parameter, put together, is the full parameter, wherever the cuts fall."""

from types import SimpleNamespace
from unittest.mock import patch

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from fsdplaunch.runtime.auto.state.rank0 import flat_shards
from fsdplaunch.runtime.auto.state.rank0.flat_shards import FlatPlace, FlatShard, places_of
from fsdplaunch.runtime.torch_internals.fsdp.fsdp1 import FlatParameter

RUNS = st.lists(st.tuples(st.integers(1, 9), st.booleans()), min_size=1, max_size=6)


def unit_of(rank: int, size: int, runs: list[tuple[int, bool]], *, shown: bool) -> FlatParameter:
    """Return what FSDP1 would tell of a flat parameter of these runs of elements on one rank."""
    part = -(-sum(count for count, _ in runs) // size)
    whole = torch.arange(part * size, dtype=torch.float64)
    shard = whole[rank * part : (rank + 1) * part]
    places, begin = [], 0
    for count, is_padding in runs:
        first, last = max(begin, rank * part), min(begin + count, (rank + 1) * part)
        if not is_padding:
            inside = SimpleNamespace(
                in_shard=first < last,
                offset_in_shard=first - rank * part,
                numel_in_shard=last - first,
                intra_param_start_idx=first - begin,
            )
            places.append(inside if first < last else SimpleNamespace(in_shard=False))
        begin += count
    known = [count for count, is_padding in runs if not is_padding]
    own = [shard[p.offset_in_shard :][: p.numel_in_shard] if p.in_shard else shard[:0] for p in places]
    return FlatParameter(
        tensor=nn.Parameter(shard),
        shard=shard,
        shapes=[torch.Size([count]) for count in known],
        infos=[],
        names=[],
        shared=[],
        places=places,
        params=[nn.Parameter(each) for each in own] if shown else [],
        counts=[count for count, _ in runs],
        is_padding=[is_padding for _, is_padding in runs],
        is_contiguous=[True] * len(known),
        strides=[(1,)] * len(known),
        shard_numel=part,
    )


def places_on(rank: int, size: int, runs: list[tuple[int, bool]], *, shown: bool) -> list[FlatPlace]:
    group = [10 + each for each in range(size)]  # ranks of the run are not places in the group
    flat = unit_of(rank, size, runs, shown=shown)
    with (
        patch.object(flat_shards, "flat_parameter", lambda _: flat),
        patch.object(flat_shards.dist, "get_process_group_ranks", lambda _: group),
    ):
        return places_of(SimpleNamespace(process_group=None), (0, 0))


def put_together(shards: list[FlatShard], ranks: tuple[int, ...]) -> torch.Tensor:
    full = torch.full((shards[0].shape.numel(),), -1.0, dtype=torch.float64)
    for rank in ranks:
        shard = shards[rank - 10]
        full[shard.start : shard.start + shard.local.numel()] = shard.local
    return shards[0].shaped(full)


@settings(max_examples=60, deadline=None)
@given(RUNS, st.integers(1, 5), st.booleans())
def test_parts_of_the_ranks_that_are_named_make_the_full_parameter(
    runs: list[tuple[int, bool]], size: int, shown: bool
) -> None:
    found = [places_on(rank, size, runs, shown=shown) for rank in range(size)]
    ends = torch.tensor([count for count, _ in runs]).cumsum(0).tolist()
    wanted = [range(end - count, end) for (count, padding), end in zip(runs, ends, strict=True) if not padding]
    assert [len(each) for each in found] == [len(wanted)] * size
    for number, elements in enumerate(wanted):
        places = [each[number] for each in found]
        state = [torch.zeros_like(place.flat.params[number] if shown else place.flat.shard) for place in places]
        kept = [place.state(value) for place, value in zip(places, state, strict=True)]
        assert {place.ranks for place in places} == {places[0].ranks}
        shards = [place.parameter() for place in places]
        assert put_together(shards, places[0].ranks).tolist() == list(elements)
        assert put_together(kept, places[0].ranks).tolist() == [0.0] * len(elements)
        assert {10 + rank for rank, each in enumerate(shards) if each.local.numel()} == set(places[0].ranks)


def test_state_that_is_not_divided_as_its_parameter_is_no_shard() -> None:
    [place] = places_on(0, 2, [(6, False)], shown=True)
    assert place.state(torch.zeros(2)) is None
    assert place.state(torch.zeros(())) is None
