"""Pages go to disk while a file is still written: each byte once, in order, in large strides."""

from fsdplaunch.checkpoint.byte_transfer import STRIDE, Writeback


def test_written_stretches_are_handed_over_once_and_in_order(tmp_path):
    with (tmp_path / "file").open("wb") as file:
        follower = Writeback(file.fileno())
        calls = []
        follower.start = lambda fd, offset, length: calls.append((offset, length))
        for position in (STRIDE - 1, STRIDE, STRIDE + 5, 5 * STRIDE, 5 * STRIDE + 1):
            follower.reached(position)
    assert calls == [(0, STRIDE), (STRIDE, 4 * STRIDE)]


def test_the_system_accepts_what_is_handed_over(tmp_path):
    path = tmp_path / "file"
    with path.open("wb") as file:
        file.write(b"x" * (STRIDE + 3))
        file.flush()
        follower = Writeback(file.fileno())
        follower.reached(STRIDE + 3)
        assert follower.start is None or follower.begun == STRIDE + 3
    assert path.read_bytes() == b"x" * (STRIDE + 3)


def test_without_the_call_nothing_is_handed_over(tmp_path, monkeypatch):
    monkeypatch.setattr("fsdplaunch.checkpoint.byte_transfer._kernel_start", lambda: None)
    with (tmp_path / "file").open("wb") as file:
        follower = Writeback(file.fileno())
        follower.reached(3 * STRIDE)
        assert follower.begun == 0
