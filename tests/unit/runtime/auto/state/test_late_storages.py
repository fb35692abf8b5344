"""Storages that are filled when torch.save writes them: the file is what it would be, whatever fails."""

import io
from pathlib import Path

import pytest
import torch

from fsdplaunch.runtime.auto.state.late_storages import LateStorages


def test_file_has_the_values_that_come_while_it_is_written_each_once(tmp_path: Path) -> None:
    values = [torch.randn(300, 70), torch.randn(5, 5).half(), torch.ones(3, dtype=torch.bool)]
    asked: list[int] = []

    def fill(number: int) -> torch.Tensor:
        asked.append(number)
        return values[number]

    late = LateStorages()
    tensors = [late.tensor(v.shape, v.dtype, lambda number=n: fill(number)) for n, v in enumerate(values)]
    plain = torch.arange(4)
    assert asked == []
    for file in (tmp_path / "late.pt", io.BytesIO()):
        asked.clear()
        late = LateStorages()
        tensors = [late.tensor(v.shape, v.dtype, lambda number=n: fill(number)) for n, v in enumerate(values)]
        with late.writing():
            torch.save({"first": tensors[0], "rest": [tensors[1], plain, tensors[2], tensors[0]]}, file)
        assert asked == [0, 1, 2]
        if isinstance(file, io.BytesIO):
            file.seek(0)
        found = torch.load(file)
        for one, other in zip(
            [found["first"], *found["rest"]], [*values[:2], plain, values[2], values[0]], strict=True
        ):
            assert one.dtype == other.dtype
            assert torch.equal(one, other)
        assert found["first"].data_ptr() == found["rest"][3].data_ptr()
        assert not tensors[0].any()  # its memory is free again


def test_after_a_failure_all_that_is_left_is_asked_for_in_order() -> None:
    asked: list[int] = []

    def fill(number: int) -> torch.Tensor:
        asked.append(number)
        if number == 1:
            raise OSError
        return torch.zeros(8)

    late = LateStorages()
    tensors = [late.tensor(torch.Size([8]), torch.float32, lambda number=n: fill(number)) for n in (0, 1, 2, 3)]
    with pytest.raises(OSError), late.writing():
        torch.save(tensors, io.BytesIO())
    late.drain()
    late.drain()
    assert asked == [0, 1, 2, 3]
    assert "writing" not in torch.serialization._open_zipfile_writer.__qualname__  # torch's own again


def test_a_rank_that_does_not_write_takes_part_in_the_same_order() -> None:
    asked: list[int] = []
    late = LateStorages()
    for number in range(3):
        late.take_part(lambda number=number: asked.append(number))
    late.drain()
    assert asked == [0, 1, 2]
