"""Adapting a module when, and only when, something imports it."""

import sys

import pytest

from fsdplaunch.runtime.patch import once_imported


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A package `guest` with a module `guest.inner` that nothing has imported."""
    (tmp_path / "guest").mkdir()
    (tmp_path / "guest" / "__init__.py").write_text("from guest.inner import value\n")
    (tmp_path / "guest" / "inner.py").write_text("value = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    yield "guest"
    for name in ("guest", "guest.inner"):
        sys.modules.pop(name, None)


def change(module):
    module.value += 1


def test_module_imported_later_is_adapted_before_its_importer_sees_it(package):
    finders = list(sys.meta_path)
    once_imported("guest.inner", change)
    assert "guest" not in sys.modules
    assert __import__(package).value == 2
    assert sys.meta_path == finders


def test_module_imported_before_is_adapted_at_once(package):
    inner = __import__(f"{package}.inner", fromlist=["value"])
    once_imported("guest.inner", change)
    assert inner.value == 2


def test_module_that_is_missing_stays_missing(package):
    once_imported(f"{package}.none", change)
    with pytest.raises(ModuleNotFoundError, match=r"guest\.none"):
        __import__(f"{package}.none")
