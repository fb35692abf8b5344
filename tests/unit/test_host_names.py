"""Names that no host can have are not known; Python itself cannot encode them."""

import socket

import pytest

from fsdplaunch.launch.coordination import network
from fsdplaunch.sockets import addresses, connected, held

ODD = ("a..b", "x" * 64, f"{'9' * 200}.example", "\udce4.example")


@pytest.mark.parametrize("name", ODD)
def test_text_that_is_no_host_name_is_a_name_that_is_not_known(name: str) -> None:
    with pytest.raises(socket.gaierror):
        connected(name, 1, 1.0)
    with pytest.raises(OSError, match="host"):
        held(name, 0)
    assert network.reach(name, 1, "word") == "the name is not known"
    assert (network.resolve(name), network.answers(name, 1), network.address_towards(name)) == ([], False, None)


def test_addresses_are_looked_up() -> None:
    assert addresses("127.0.0.1", 80) == [(socket.AF_INET, ("127.0.0.1", 80))]
