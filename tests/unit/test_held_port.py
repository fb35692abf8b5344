"""A port that is held: nobody else listens there, and its own server does when it is ready."""

import os
import socket

import pytest

from fsdplaunch.launch.coordination import network
from fsdplaunch.sockets import HELD, held, listening, take_held


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


def test_port_that_is_taken_is_not_held():
    with network.listen("127.0.0.1", 0) as taken, pytest.raises(OSError, match="in use"):
        held("127.0.0.1", taken.getsockname()[1])


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
