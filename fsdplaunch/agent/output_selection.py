"""Which streams of which ranks reach the terminal. Pure."""

from fsdplaunch.config.schema.config import LaunchSection

_BITS = {"stdout": 1, "stderr": 2}


def is_shown(launch: LaunchSection, *, rank: int, local_rank: int, stream: str) -> bool:
    """Return whether a stream is shown; every stream goes to its file besides.

    What torchrun's options say goes first: a teed stream is shown, a redirected one is not, and of those only the
    filtered ranks'. Where they say nothing, `show_ranks` decides.

    Args:
        launch: The configuration.
        rank: Global rank.
        local_rank: Rank on its node.
        stream: `stdout` or `stderr`.
    """
    teed = _names(launch.tee, local_rank, stream)
    if teed is False and _names(launch.redirects, local_rank, stream):
        return False
    if launch.show_local_ranks is not None:
        return local_rank in ranks_in(launch.show_local_ranks, at_least=local_rank)
    return teed or rank in ranks_in(launch.show_ranks, at_least=rank)


def ranks_in(text: str, *, at_least: int) -> set[int]:
    """Return the numbers a list of ranks names; `all` names those up to `at_least`."""
    return set(range(at_least + 1)) if text == "all" else {int(part) for part in text.split(",")}


def _names(streams: str | None, local_rank: int, stream: str) -> bool:
    """Return whether torchrun's notation (`3`, or `0:3,1:1`) names this stream of this worker."""
    if streams is None:
        return False
    if ":" not in streams:
        return bool(int(streams) & _BITS[stream])
    codes = dict(part.split(":") for part in streams.split(","))
    return bool(int(codes.get(str(local_rank), "0")) & _BITS[stream])
