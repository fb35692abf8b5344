"""Rank 0's listener: ranks get in at once, and nobody else, whatever they send and however long they wait."""

import asyncio
import socket
import threading
import time

import pytest

from fsdplaunch.errors import CheckpointError
from fsdplaunch.runtime.auto.rank0 import side_channel as module
from fsdplaunch.runtime.auto.rank0.side_channel import accept, greeting
from fsdplaunch.sockets import bound, listening

SECRET = bytes(range(32))


class Listener:
    def __init__(self, size: int) -> None:
        self.size = size
        self.sock = bound("127.0.0.1", 0)
        _, self.port = listening(self.sock)

    def accept(self):
        return asyncio.run(accept(self.sock, self.size, SECRET))


def connected(listener: Listener, *words: bytes) -> socket.socket:
    stream = socket.create_connection(("127.0.0.1", listener.port), timeout=5)
    for each in words:
        stream.sendall(each)
    return stream


def is_closed(stream: socket.socket) -> bool:
    try:
        return stream.recv(1) == b""
    except ConnectionResetError:
        return True


def test_ranks_get_in_at_once_beside_strangers_of_every_kind(caplog):
    listener = Listener(4)
    silent = [connected(listener) for _ in range(40)]
    wrong = [
        connected(listener, b"GET / HTTP/1.1\r\n\r\n" * 100),
        *(connected(listener, greeting(bytes(32), 1)), connected(listener, SECRET[:-1])),
        *(connected(listener, greeting(SECRET, rank)) for rank in (0, 4, 2**32 - 1)),
    ]
    connected(listener).close()
    first = connected(listener, greeting(SECRET, 2))
    again = connected(listener, greeting(SECRET, 2))

    def come_in_pieces() -> None:
        words = greeting(SECRET, 1)
        stream = connected(listener, words[:1])
        for each in (words[1:20], words[20:]):
            time.sleep(0.1)
            stream.sendall(each)
        slow.append(stream)
        slow.append(connected(listener, greeting(SECRET, 3)))

    slow: list[socket.socket] = []
    threading.Thread(target=come_in_pieces, daemon=True).start()
    found = listener.accept()
    assert [rank for rank, _ in found] == [1, 2, 3]
    first.sendall(b"more")
    assert found[1][1].recv(4) == b"more"
    assert found[1][1].getpeername() == first.getsockname()
    assert all(is_closed(stream) for stream in [again, *silent, *wrong])
    assert caplog.records == []  # asyncio logs, and so prints, whoever is still waited for
    with pytest.raises(ConnectionRefusedError):
        connected(listener)


def test_more_strangers_than_are_waited_for_keep_no_rank_out(monkeypatch):
    monkeypatch.setattr(module, "UNPROVEN", 4)
    listener = Listener(2)
    strangers = [connected(listener) for _ in range(30)]
    connected(listener, greeting(SECRET, 1))
    assert [rank for rank, _ in listener.accept()] == [1]
    assert sum(map(is_closed, strangers)) == 30


def test_ranks_that_do_not_come_are_named(monkeypatch):
    monkeypatch.setattr(module, "CONNECT_SECONDS", 0.6)
    monkeypatch.setattr(module, "GREETING_SECONDS", 0.1)
    listener = Listener(3)
    silent = connected(listener)
    connected(listener, greeting(SECRET, 1))
    with pytest.raises(CheckpointError, match=r"ranks \[2\] did not connect"):
        listener.accept()
    assert is_closed(silent)


@pytest.mark.parametrize(
    ("address", "found", "bindable"),
    [
        ("127.0.0.1", "127.0.0.1", "127.0.0.1"),
        ("localhost", "::1", "::1"),
        ("node0", "10.0.0.7", "10.0.0.7"),
        ("node0", "127.0.1.1", "0.0.0.0"),
        ("fe80::1%eth0", "fe80::1%eth0", "fe80::1%eth0"),
    ],
)
def test_listens_where_the_others_come_to(monkeypatch, address, found, bindable):
    monkeypatch.setattr(module.socket, "getaddrinfo", lambda *_args, **_kwargs: [(0, 0, 0, "", (found, 0))])
    assert module._bindable(address) == bindable
