"""A /proc and /sys made for the purpose."""

import pytest


@pytest.fixture
def make_root(tmp_path):
    """Write files below a folder that stands for `/`; returns the folder."""

    def make(files):
        for name, text in files.items():
            path = tmp_path / "root" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return tmp_path / "root"

    return make
