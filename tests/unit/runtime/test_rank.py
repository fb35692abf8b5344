"""Which worker this process is, also when the script must not see it."""

import os

import pytest

from fsdplaunch.runtime import rank as ranks

SEEN = {
    "RANK": "3",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "4",
    "MASTER_ADDR": "h",
    "SLURM_PROCID": "3",
    "GROUP_RANK": "0",
}
KEPT = {"TORCHELASTIC_ERROR_FILE": "/e.json", "RANKING": "1", "FSDP_VERSION": "2"}


def test_hidden_ranks_are_known_to_this_package_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "_hidden", {})
    for name, value in (SEEN | KEPT).items():
        monkeypatch.setenv(name, value)
    ranks.hide_ranks()
    assert not set(SEEN) & set(os.environ)
    assert {name: os.environ[name] for name in KEPT} == KEPT
    assert (ranks.rank(), ranks.world_size()) == (3, 4)
    monkeypatch.setenv("RANK", "0")  # what the script sets for itself changes nothing here
    assert ranks.rank() == 3
