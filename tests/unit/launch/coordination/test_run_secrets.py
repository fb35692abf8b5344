"""The run's secret: where a node finds it, who is refused, and what both sides are told."""

import threading

import pytest

from fsdplaunch.config.schema.config import Config, LaunchSection
from fsdplaunch.errors import MachineError, UsageError
from fsdplaunch.launch.coordination import secret_source
from fsdplaunch.launch.coordination.placement import NodePlacement
from fsdplaunch.launch.coordination.protocol import PROTOCOL, CoordinatorHandshake, NodeHandshake, ProtocolError
from fsdplaunch.launch.coordination.secret_source import SecretSource, find_secret
from fsdplaunch.run_secret import SECRET, is_secret, make_secret
from tests.joining import SECRET as GIVEN
from tests.joining import Place, counter

PLACE = NodePlacement(least=2, most=2, host="host0", port=29500)


def sources(folder, environ=None, **launch):
    """The secret's source on two nodes with one folder of runs."""
    config = Config(launch=LaunchSection(log_dir=str(folder), **launch))
    return [find_secret(config, PLACE, environ or {}, address="10.0.0.1") for _ in range(2)]


def test_nodes_that_share_the_folder_need_nothing_else(tmp_path):
    first, other = sources(tmp_path / "runs")
    offered = first.offer()
    assert is_secret(offered)
    (file,) = (tmp_path / "runs").iterdir()
    assert file.stat().st_mode & 0o777 == 0o600
    assert other.wait() == offered
    later = SecretSource("", file)
    later.offer()
    first.withdraw()  # not what another run has left since
    assert file.exists()
    later.withdraw()
    assert not list((tmp_path / "runs").iterdir())


def test_file_that_others_can_write_or_that_is_a_link_is_not_read(monkeypatch, tmp_path):
    monkeypatch.setattr(secret_source, "_PATIENCE_SECONDS", 0.2)
    first, other = sources(tmp_path)
    first.offer()
    (file,) = tmp_path.iterdir()
    file.chmod(0o666)
    assert other.wait() == ""
    file.unlink()
    (tmp_path / "elsewhere").write_text(make_secret())
    file.symlink_to(tmp_path / "elsewhere")
    assert other.wait() == ""


def test_variable_goes_before_the_folder(tmp_path):
    by_variable, _ = sources(tmp_path / "runs", {SECRET: GIVEN})
    assert by_variable.offer() == by_variable.wait() == GIVEN
    assert not (tmp_path / "runs").exists()


def test_variable_that_is_no_secret_is_refused(tmp_path):
    with pytest.raises(UsageError, match="FSDPLAUNCH_SECRET is not a run's secret"):
        sources(tmp_path, {SECRET: "hunter2"})


@pytest.mark.parametrize(
    ("secret", "node_hears", "coordinator_says"),
    [
        ("cd" * 32, "has a different secret from this node: it is another run", "connected with another secret"),
        ("", "asks for the run's secret, and this node has none", "connected without a secret"),
    ],
)
def test_node_without_the_secret_and_the_coordinator_are_told(monkeypatch, secret, node_hears, coordinator_says):
    monkeypatch.setattr(secret_source, "_PATIENCE_SECONDS", 0.2)
    place = Place(2, seconds=6)
    gathering = threading.Thread(target=place.coordinator.gather, args=(counter(),), daemon=True)
    gathering.start()
    with pytest.raises(MachineError, match=node_hears):
        place.client(secret=secret).connect(counter())
    assert any(coordinator_says in line for line in place.told)
    place.come(1).join(10)  # it did no harm
    gathering.join(10)
    assert place.coordinator.assignment.world == 2
    place.close()


def test_coordinator_proves_the_secret_too():
    stranger, node = CoordinatorHandshake("cd" * 32), NodeHandshake(GIVEN)
    node.reply(stranger.opening)
    with pytest.raises(ProtocolError):
        node.is_accepted("00" * 32)


def test_secret_is_never_sent():
    host, node = CoordinatorHandshake(GIVEN), NodeHandshake(GIVEN)
    reply = node.reply(host.opening)
    accepted, answer = host.answer(reply)
    assert accepted
    assert node.is_accepted(answer)
    assert GIVEN not in host.opening + reply + answer
    assert host.opening.startswith(PROTOCOL)


def test_source_waits_a_moment_for_a_shared_file_and_no_longer(tmp_path):
    source = SecretSource("", tmp_path / ".join-x")
    threading.Timer(0.3, lambda: SecretSource("", tmp_path / ".join-x").offer()).start()
    assert is_secret(source.wait())
    assert [path.name for path in tmp_path.iterdir()] == [".join-x"]
