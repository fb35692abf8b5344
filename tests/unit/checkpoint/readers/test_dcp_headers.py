"""Items that look alike are compared with the first of their kind: the same answer as parsing each of them."""

import pytest

from fsdplaunch.checkpoint.readers import data_files
from fsdplaunch.checkpoint.readers.data_files import read_items
from fsdplaunch.checkpoint.readers.open import open_checkpoint
from fsdplaunch.checkpoint.readers.torch_zip import parse_item
from fsdplaunch.errors import CheckpointError

IDENTIFIER = (".data/serialization_id", b"0" * 40)


def twins(dcp, *, count=2, rows=4, crc=True):
    """Tensors of one kind in one file, each with data and an identifier of its own."""
    draft = dcp.Draft()
    for number in range(count):
        data = dcp.pattern(rows * 4, number)
        own = (IDENTIFIER[0], bytes([48 + number]) * 40)
        draft.add(f"w{number}", (rows,), data=data, crc=crc, extra=[own])
    return draft


def read_all(folder):
    with open_checkpoint(folder) as opened:
        return read_items(opened.sources, opened.index.tensors)


def parsed_alone(folder):
    with open_checkpoint(folder) as opened:
        places = [chunk.place for tensor in opened.index.tensors for chunk in tensor.chunks]
        return {place: parse_item(opened.sources.window(place))[0] for place in places}


@pytest.mark.parametrize("rows", [4, 20_000])  # whole items at once; head and tail of each
@pytest.mark.parametrize("crc", [True, False])
def test_items_of_a_kind_are_what_parsing_each_gives(dcp, rows, crc, tmp_path, monkeypatch):
    folder = twins(dcp, count=5, rows=rows, crc=crc).save(tmp_path / "ckpt")
    calls = []
    whole = data_files.parse_item
    monkeypatch.setattr(data_files, "parse_item", lambda window: calls.append(1) or whole(window))
    items = read_all(folder)
    assert len(calls) == 1
    assert items == parsed_alone(folder)
    assert len({item.crc for item in items.values()}) == (5 if crc else 1)


def outcome(folder):
    try:
        return read_all(folder)
    except CheckpointError as problem:
        return problem.message


def test_each_changed_byte_of_a_later_item_has_the_same_outcome_as_when_it_is_parsed(dcp, tmp_path, monkeypatch):
    folder = twins(dcp).save(tmp_path / "ckpt")
    with open_checkpoint(folder) as opened:
        place = opened.index.tensors[1].chunks[0].place
    path = folder / place.file
    raw = path.read_bytes()
    outcomes = []
    for never in (False, True):
        if never:
            monkeypatch.setattr(data_files, "make_form", lambda *_: None)
        found = []
        for at in range(place.offset, place.offset + place.length, 11):
            spoilt = bytearray(raw)
            spoilt[at] ^= 0x41
            path.write_bytes(spoilt)
            found.append(outcome(folder))
        outcomes.append(found)
    assert outcomes[0] == outcomes[1]
    refused = sum(isinstance(one, str) for one in outcomes[0])
    assert 0 < refused < len(outcomes[0])
