"""Which streams reach the terminal."""

import pytest

from fsdplaunch.agent.worker_spec import is_shown
from fsdplaunch.config.schema.config import LaunchSection


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        ({}, {"0out", "0err"}),
        ({"show_ranks": "all"}, {"0out", "0err", "1out", "1err", "2out", "2err"}),
        ({"show_ranks": "1,2"}, {"1out", "1err", "2out", "2err"}),
        ({"tee": "3"}, {"0out", "0err", "1out", "1err", "2out", "2err"}),
        ({"tee": "1:2"}, {"0out", "0err", "1err"}),
        ({"redirects": "3"}, set()),
        ({"redirects": "1"}, {"0err"}),
        ({"redirects": "3", "tee": "0:1"}, {"0out"}),
        ({"redirects": "0:1", "show_ranks": "all"}, {"0err", "1out", "1err", "2out", "2err"}),
        ({"show_local_ranks": "2"}, {"2out", "2err"}),
        ({"show_local_ranks": "all"}, {"0out", "0err", "1out", "1err", "2out", "2err"}),
        ({"show_local_ranks": "2", "tee": "3"}, {"2out", "2err"}),
        ({"show_local_ranks": "1,2", "redirects": "1"}, {"1err", "2err"}),
    ],
)
def test_streams_shown_of_three_ranks(said, shown):
    launch = LaunchSection(**said)
    streams = {
        f"{rank}{stream[3:]}"
        for rank in range(3)
        for stream in ("stdout", "stderr")
        if is_shown(launch, rank=rank, local_rank=rank, stream=stream)
    }
    assert streams == shown


def test_show_ranks_counts_over_machines_and_show_local_ranks_on_each():
    assert not is_shown(LaunchSection(), rank=4, local_rank=0, stream="stdout")
    assert is_shown(LaunchSection(show_local_ranks="0"), rank=4, local_rank=0, stream="stdout")
