"""States of random number generators that somebody else has written."""

import io

import pytest
import torch

from fsdplaunch.errors import CheckpointError
from fsdplaunch.runtime.saving.plain_files import packed_random_states, random_states, read_random_states


def test_states_of_another_number_of_gpus_are_left_and_said(tmp_path, monkeypatch, capsys):
    states = torch.load(io.BytesIO(packed_random_states(random_states(3))), weights_only=True)
    torch.save(states | {"torch_cuda_manual_seed": [torch.zeros(16, dtype=torch.uint8)]}, tmp_path / "states")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_rng_state_all", list)
    read_random_states(tmp_path / "states")
    assert "GPU random states are not restored: the checkpoint has 1, this node 2 GPUs" in capsys.readouterr().err


WRONG = [None, -1, 2**70, "x", [], {}, [[]], 1.5, torch.ones(3), (3, tuple(range(600)), None)]


@pytest.mark.parametrize("name", ["random_state", "torch_manual_seed", "numpy_random_seed", None])
def test_wrong_states_are_refused(tmp_path, name):
    pytest.importorskip("numpy")
    states = torch.load(io.BytesIO(packed_random_states(random_states(3))), weights_only=True)
    for value in WRONG:
        torch.save(value if name is None else {**states, name: value}, tmp_path / "states")
        with pytest.raises(CheckpointError, match="holds no states of random number generators"):
            read_random_states(tmp_path / "states")
