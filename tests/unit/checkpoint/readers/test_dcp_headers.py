"""Items that look alike are compared with the first of their kind: the same answer as parsing each of them."""

import pytest

from fsdplaunch.checkpoint.readers import data_files
from fsdplaunch.checkpoint.readers.data_files import HeaderReader, open_data_files, read_items
from fsdplaunch.checkpoint.readers.dcp_index import read_index
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
    index = read_index(folder)
    with open_data_files(folder, index) as sources:
        items = read_items(sources, index.tensors)
        return index, items


def parsed_alone(folder):
    index = read_index(folder)
    with open_data_files(folder, index) as sources:
        return {
            chunk.place: parse_item(sources.window(chunk.place))[0]
            for tensor in index.tensors
            for chunk in tensor.chunks
        }


@pytest.mark.parametrize("rows", [4, 20_000])  # whole items at once; head and tail of each
@pytest.mark.parametrize("crc", [True, False])
def test_items_of_a_kind_are_what_parsing_each_gives(dcp, rows, crc, tmp_path, monkeypatch):
    folder = twins(dcp, count=5, rows=rows, crc=crc).save(tmp_path / "ckpt")
    calls = []
    whole = data_files.parse_item
    monkeypatch.setattr(data_files, "parse_item", lambda window: calls.append(1) or whole(window))
    _, items = read_all(folder)
    assert len(calls) == 1
    assert items == parsed_alone(folder)
    assert len({item.crc for item in items.values()}) == (5 if crc else 1)


def outcome(folder):
    try:
        return read_all(folder)[1]
    except CheckpointError as problem:
        return problem.message


def test_each_changed_byte_of_a_later_item_has_the_same_outcome_as_when_it_is_parsed(dcp, tmp_path, monkeypatch):
    folder = twins(dcp).save(tmp_path / "ckpt")
    index = read_index(folder)
    place = index.tensors[1].chunks[0].place
    path = folder / place.file
    raw = path.read_bytes()
    outcomes = []
    for never in (False, True):
        if never:
            monkeypatch.setattr(data_files, "make_form", lambda *_: None)
        found = []
        for at in range(place.offset, place.offset + place.length):
            spoilt = bytearray(raw)
            spoilt[at] ^= 0x41
            path.write_bytes(spoilt)
            found.append(outcome(folder))
        outcomes.append(found)
    assert outcomes[0] == outcomes[1]
    refused = sum(isinstance(one, str) for one in outcomes[0])
    assert 0 < refused < len(outcomes[0])


def test_table_of_forms_stays_small(dcp, tmp_path, monkeypatch):
    monkeypatch.setattr(data_files, "MAX_FORMS", 3)
    draft = dcp.Draft()
    for number in range(10):
        draft.add(f"w{number}", (number + 1,))
    folder = draft.save(tmp_path / "ckpt")
    index = read_index(folder)
    with open_data_files(folder, index) as sources:
        reader = HeaderReader(sources)
        for tensor in sorted(index.tensors, key=lambda tensor: tensor.chunks[0].place):
            reader.read(tensor, tensor.chunks[0])
            assert len(reader.forms) <= 3
