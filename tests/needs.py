"""Skips for what only newer versions of torch and of the libraries around it can do, each with its reason."""

from importlib.metadata import PackageNotFoundError, version

import pytest


def has(package: str, oldest: str) -> bool:
    """Return whether a package is installed in this version or a newer one."""
    try:
        return _numbers(version(package)) >= _numbers(oldest)
    except PackageNotFoundError:
        return False


def needs(package: str, oldest: str, why: str) -> pytest.MarkDecorator:
    """Skip a test where a package is older than what it asks for.

    Args:
        package: Its name as pip knows it.
        oldest: The first version that can do it, `2.11`.
        why: What older ones do, to follow `torch 2.9.1 `.
    """
    return pytest.mark.skipif(not has(package, oldest), reason=lacking(package, oldest, why))


def lacking(package: str, oldest: str, why: str) -> str:
    """Return the reason for a skip: `torch 2.9.1 cannot ...: needs 2.11`."""
    try:
        found = f"{package} {version(package).partition('+')[0]}"
    except PackageNotFoundError:
        found = f"no {package}"
    return f"{found} {why}: needs {oldest}"


def _numbers(text: str) -> tuple[int, int]:
    major, minor = text.split(".")[:2]
    return int(major), int(minor)
