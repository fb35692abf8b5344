"""Which torch_xla is installed, and whether it goes with the installed torch. Imports neither."""

from fsdplaunch.probe.torch_version import Mismatch, installed, parse

NEWEST_RELEASE = "2.9.0"
"""Of torch_xla, and of the torch that it needs, as of the tests."""
_INSTALL = f"pip install 'fsdplaunch[xla]' into an environment of its own: torch and torch_xla {NEWEST_RELEASE}"


def installed_problem() -> Mismatch | None:
    """Return why PyTorch/XLA cannot run with what is installed; None when it can."""
    return problem(installed(), _installed_xla())


def problem(torch: str | None, torch_xla: str | None) -> Mismatch | None:
    """Return why this torch and this torch_xla do not go together; None when they do.

    Args:
        torch: The version of torch, None where there is none.
        torch_xla: The version of torch_xla, None where there is none.
    """
    here = f"torch {torch} is installed" if torch else "torch is not installed"
    if torch_xla is None:
        return Mismatch(
            message=f"PyTorch/XLA needs torch_xla, which is not installed; {here}", hint=_INSTALL, is_fatal=True
        )
    if torch is None or parse(torch) != parse(torch_xla):
        needed = ".".join(map(str, parse(torch_xla) or ())) or torch_xla
        return Mismatch(
            message=f"torch_xla {torch_xla} needs torch {needed}, and {here}", hint=_INSTALL, is_fatal=True
        )
    return None


def _installed_xla() -> str | None:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("torch_xla")
    except PackageNotFoundError:
        return None
