"""Models by their hub name: from the local cache, or configuration and headers fetched, or one sentence."""

import json
import os
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import pytest

from fsdplaunch.errors import UsageError
from fsdplaunch.estimate.model import read_sizes
from fsdplaunch.probe import model_files
from fsdplaunch.probe.model_files import cache_folder, hub_folder, is_hub_name

HEADER = {"layers.0.w": {"dtype": "BF16", "shape": [4, 2], "data_offsets": [0, 16]}}


@pytest.fixture(autouse=True)
def hub(tmp_path, monkeypatch):
    """An empty cache, and nothing remembered."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.chdir(tmp_path)
    hub_folder.cache_clear()
    return tmp_path / "hub"


def snapshot(hub, revision, *, main=False):
    home = hub / "models--org--tiny"
    folder = home / "snapshots" / revision
    folder.mkdir(parents=True)
    (folder / "config.json").write_text('{"model_type": "llama"}')
    text = json.dumps(HEADER).encode()
    (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + bytes(16))
    if main:
        (home / "refs").mkdir()
        (home / "refs" / "main").write_text(revision)
    return folder


def test_a_hub_name_is_told_from_a_folder(tmp_path):
    (tmp_path / "org").mkdir()
    (tmp_path / "org" / "here").mkdir()
    names = ("org/model", "org/here", "8b", "/abs/model", "a/b/c", "../x")
    assert [is_hub_name(name) for name in names] == [True, False, False, False, False, False]


def test_the_cached_snapshot_of_main_is_taken(hub):
    snapshot(hub, "1111")
    wanted = snapshot(hub, "2222", main=True)
    snapshot(hub, "3333")
    assert hub_folder("org/tiny") == wanted
    assert read_sizes(wanted).parameters == 8


def test_a_model_that_is_nowhere_is_one_sentence(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(UsageError, match="org/tiny is neither a folder nor in the hub's cache") as caught:
        hub_folder("org/tiny")
    assert "\n" not in caught.value.message
    assert "8b" in caught.value.hint


class Answers(BaseHTTPRequestHandler):
    """Answers as the hub does for models that it does not give."""

    def do_HEAD(self):
        code = {"/org/gated": "GatedRepo", "/org/none": "RepoNotFound", "/org/bare": "EntryNotFound"}
        found = next((error for path, error in code.items() if self.path.startswith(path)), None)
        self.send_response(200 if found is None else 403 if found == "GatedRepo" else 404)
        self.send_header("X-Error-Code", found or "")
        self.end_headers()

    def log_message(self, *words):
        pass


def test_why_the_hub_gives_nothing_is_one_sentence_and_comes_at_once(monkeypatch, tmp_path):
    pytest.importorskip("huggingface_hub", reason="it comes with transformers, a development dependency")
    server = ThreadingHTTPServer(("127.0.0.1", 0), Answers)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    script = (
        "import sys\nfrom huggingface_hub import constants\nfrom fsdplaunch.errors import UsageError\n"
        "from fsdplaunch.probe.model_files import hub_folder\n"
        "def ask(name):\n    try: hub_folder(name)\n    except UsageError as error: print(error.message)\n"
        "[ask('org/' + name) for name in ('gated', 'none', 'bare')]\n"
        "constants.ENDPOINT = 'http://127.0.0.1:9'\nask('org/far')\n"
    )
    environ = {**os.environ, "HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}", "HF_HUB_OFFLINE": "0"}
    began = time.monotonic()
    done = subprocess.run([sys.executable, "-c", script], env=environ, capture_output=True, text=True, check=True)
    server.shutdown()
    server.server_close()
    assert time.monotonic() - began < 15  # its client alone asks for 23 s
    assert done.stderr == ""
    reasons = [line.partition("it cannot be downloaded: ")[2] for line in done.stdout.splitlines()]
    assert [reason.split(";")[0] for reason in reasons[:3]] == [
        "it is gated",
        "the hub knows no such model, or it is private",
        "it has no config.json",
    ]
    assert "refused" in reasons[3]


def test_configuration_and_headers_are_fetched_and_no_weights(tmp_path, monkeypatch):
    (tmp_path / "fetched.json").write_text('{"model_type": "llama"}')
    tensor = SimpleNamespace(dtype="BF16", shape=[1000, 1000], data_offsets=(0, 2_000_000))
    found = SimpleNamespace(files_metadata={"model.safetensors": SimpleNamespace(tensors={"layers.0.w": tensor})})
    client = SimpleNamespace(
        hf_hub_download=lambda name, file: str(tmp_path / "fetched.json"),
        get_safetensors_metadata=lambda name: found,
        get_session=lambda: SimpleNamespace(head=lambda address, timeout: None),
        constants=SimpleNamespace(ENDPOINT="https://huggingface.co"),
    )
    monkeypatch.setitem(sys.modules, "huggingface_hub", client)
    monkeypatch.setattr(model_files, "find_spec", lambda _: True)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    folder = hub_folder("org/tiny")
    model = read_sizes(folder)
    assert (model.parameters, model.itemsize) == (1_000_000, 2)
    assert (folder / "config.json").read_text() == '{"model_type": "llama"}'
    written = (folder / "model.safetensors").stat()
    assert written.st_size > 2_000_000 > written.st_blocks * 512


def test_the_cache_is_where_the_hubs_client_has_it():
    assert str(cache_folder({"HF_HOME": "/x"})) == "/x/hub"
    assert str(cache_folder({"XDG_CACHE_HOME": "/c"})) == "/c/huggingface/hub"
    assert str(cache_folder({"HF_HUB_CACHE": "/h", "HF_HOME": "/x"})) == "/h"
