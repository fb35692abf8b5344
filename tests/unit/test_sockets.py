"""A port that is held until its own server listens; names that no host can have; lookups that cost no time."""

import os
import socket

import pytest

from fsdplaunch.launch.coordination import network
from fsdplaunch.sockets import HELD, addresses, connected, held, listening, take_held


@pytest.mark.parametrize("shared", [0, 1])
@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
def test_nobody_else_listens_at_a_held_port(host, shared):
    with held("127.0.0.1") as mine, socket.socket() as other:
        port = mine.getsockname()[1]
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, shared)
        with pytest.raises(OSError, match="in use"):
            other.bind((host, port))
            other.listen()
        other.close()
        with pytest.raises(ConnectionRefusedError):  # who comes early tries again
            socket.create_connection(("127.0.0.1", port), 1)
        assert listening(mine) == ("127.0.0.1", port)
        socket.create_connection(("127.0.0.1", port), 1).close()


def test_port_of_a_run_that_has_just_ended_can_be_had_again():
    with held("127.0.0.1") as mine:
        _, port = listening(mine)
        client = socket.create_connection(("127.0.0.1", port))
        mine.accept()[0].close()  # whose end closes first remembers it for a minute
        client.close()
    with held("127.0.0.1", port) as again:
        assert listening(again) == ("127.0.0.1", port)


def test_address_of_another_machine_means_all():
    with held("192.0.2.7") as mine:
        assert listening(mine)[0] == "127.0.0.1"
        assert mine.getsockname()[0] == "0.0.0.0"


def test_socket_is_taken_out_of_the_variables_and_kept_from_programs():
    mine = held("127.0.0.1")
    place = mine.getsockname()
    mine.set_inheritable(True)
    environ = {HELD: str(mine.detach())}
    with take_held(environ) as taken:
        assert (taken.getsockname(), taken.get_inheritable(), environ) == (place, False, {})


@pytest.mark.parametrize("text", ["", "x", "-1", "123456", str(os.open(os.devnull, os.O_RDONLY))])
def test_variable_that_names_no_socket_means_none(text):
    assert take_held({HELD: text}) is None


@pytest.mark.parametrize("name", ["a..b", "x" * 64, f"{'9' * 200}.example", "\udce4.example"])
def test_text_that_is_no_host_name_is_a_name_that_is_not_known(name):
    with pytest.raises(socket.gaierror):
        connected(name, 1, 1.0)
    with pytest.raises(OSError, match="host"):
        held(name, 0)
    assert network.obstacle_to(name, 1) == "the name is not known"
    assert (network.resolve(name), network.answers(name, 1), network.address_towards(name)) == ([], False, None)


def test_addresses_are_looked_up():
    assert addresses("127.0.0.1", 80) == [(socket.AF_INET, ("127.0.0.1", 80))]


def test_lookups_are_shortened_only_where_no_name_has_to_be_found():
    for host, before, after in (
        ("10.0.0.1", {}, {"RES_OPTIONS": "timeout:1 attempts:1"}),
        ("fd00::1", {}, {"RES_OPTIONS": "timeout:1 attempts:1"}),
        ("node0.cluster", {}, {}),
        ("10.0.0.1", {"RES_OPTIONS": "debug"}, {"RES_OPTIONS": "debug"}),
    ):
        environ = dict(before)
        network.shorten_name_lookups(host, environ)
        assert environ == after
