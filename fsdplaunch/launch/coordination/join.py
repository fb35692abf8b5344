"""Before torch starts: have the nodes find each other, and say in plain words why they cannot run together."""

import hashlib
import os
import platform
import socket
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from fsdplaunch import __version__
from fsdplaunch.config.schema.config import Config, all_keys, value_at
from fsdplaunch.config.schema.kinds import join_endpoint
from fsdplaunch.errors import MachineError
from fsdplaunch.launch.coordination import network
from fsdplaunch.launch.coordination.coordinator import Coordinator, JoinRequirements
from fsdplaunch.launch.coordination.node_client import NodeClient
from fsdplaunch.launch.coordination.node_info import NodeInfo
from fsdplaunch.launch.coordination.placement import NodePlacement, is_coordinator
from fsdplaunch.launch.coordination.run_control import JoinProgress, RunAssignment, RunControl, Tell
from fsdplaunch.launch.coordination.secret_source import SecretSource
from fsdplaunch.launch.plan import LaunchTarget
from fsdplaunch.probe.torch_version import installed_numbers
from fsdplaunch.sockets import make_room

_LAST_CALL_SECONDS = 10.0
"""How long an elastic run waits for more nodes once it has the least."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSpec:
    """What this node joins with."""

    config: Config
    place: NodePlacement  # which node this is, as far as it is known
    target: LaunchTarget
    workers: int
    obstacles: Sequence[str] = ()  # what keeps it from starting, each with its hint after a line break
    run_id: str  # a name for the run; node 0's counts
    fixed_run_id: bool = False  # the run's name is known to all nodes from elsewhere
    secret: SecretSource


def join_run(spec: NodeSpec, progress: JoinProgress, tell: Tell) -> RunControl:
    """Meet the other nodes; returns once all of them are ready to start."""
    if not takes_in_others(spec.place):
        return _as_node_client(spec, progress, tell)
    if _is_elsewhere(spec.place.host):
        tell(f"this is node 0, and {spec.place.host} is not its address, which is correct only behind NAT")
    return _as_coordinator(spec, progress, tell)


def takes_in_others(place: NodePlacement) -> bool:
    """Return whether the others come to this node: it is node 0, and no other answers where node 0 is to be."""
    if not is_coordinator(place):
        return False
    # Where another node does answer, it tells both of them.
    return not (place.host and _is_elsewhere(place.host) and network.answers(place.host, place.port))


def _is_elsewhere(host: str | None) -> bool:
    return host is not None and bool(network.resolve(host)) and network.own_address_of(host) is None


def own_address(spec: NodeSpec) -> str:
    """Return the address others are to reach this node by, when it is node 0."""
    configured, host = _configured_address(spec.config), spec.place.host
    if configured or host is None:
        return configured or network.own_address()
    found = network.own_address_of(host)
    if found and network.is_loopback(found) and found != host:
        return network.own_address()  # Debian gives a node's own name to 127.0.1.1
    return found or network.address_towards(host) or network.own_address()


def listening_host(spec: NodeSpec) -> str:
    """Return the one address that node 0 listens on; empty for all, where none is known to be right.

    That is so behind address translation, and where node 0's configured name means 127.0.1.1 on node 0 itself.
    """
    host = spec.place.host
    if host is None:
        return _bindable(own_address(spec))
    own = network.own_address_of(host) or ""
    return own if own == host or not network.is_loopback(own) else ""


def _bindable(address: str) -> str:
    """Return where this node can listen: behind address translation, others use an address that is not here."""
    return address if network.is_own(address) else ""


def _as_coordinator(spec: NodeSpec, progress: JoinProgress, tell: Tell) -> RunControl:
    place, launch = spec.place, spec.config.launch
    secret = spec.secret.offer()  # before the others can come
    host, configured = listening_host(spec), _configured_address(spec.config) is not None
    try:
        listener = network.listen(host, place.port)
    except OSError as error:
        msg = f"the nodes cannot join at port {place.port} of this node: {network.reason(error)}"
        hint = "set main_process_port to a free port on every node, or end the program that has it (ss -ltnp)"
        raise MachineError(msg, hint=hint) from None
    address = own_address(spec)
    requirements = JoinRequirements(
        run_id=spec.run_id,
        least=place.least,
        most=place.most,
        seconds=launch.rendezvous_timeout_seconds,
        last_call=float(launch.rendezvous_options.get("last_call_timeout", _LAST_CALL_SECONDS)),
        silence=launch.machine_timeout_seconds,
        grace=launch.shutdown_grace_seconds,
        expected=place.names,
        address_is_set=configured,
        secret=secret,
    )
    make_room(requirements.most)
    with network.listen(_bindable(address) if configured or host else "", 0) as probe:
        coordinator = Coordinator(listener, _describe_node(spec, 0, address, probe), requirements, tell)
        try:
            coordinator.gather(progress)
        except BaseException:
            coordinator.close()
            raise
        finally:
            if place.least == place.most:  # nobody joins an elastic run without it
                spec.secret.withdraw()
    return coordinator


def _as_node_client(spec: NodeSpec, progress: JoinProgress, tell: Tell) -> RunControl:
    place, launch = spec.place, spec.config.launch
    client = NodeClient(
        place.host or "",
        place.port,
        secret=spec.secret,
        seconds=launch.rendezvous_timeout_seconds,
        grace=launch.shutdown_grace_seconds,
        tell=tell,
    )
    own = client.connect(progress)
    address = _configured_address(spec.config) or own
    with network.listen(_bindable(address), 0) as probe:
        node_info = _describe_node(spec, place.rank, address, probe)
        client.join(node_info, progress, run_id=spec.run_id if spec.fixed_run_id else "")
    return client


def _describe_node(spec: NodeSpec, rank: int | None, address: str, probe: socket.socket) -> NodeInfo:
    version, target, script = installed_numbers(), spec.target, ""
    if target.is_python and not target.is_module:
        with suppress(OSError):
            script = hashlib.sha256(Path(target.name).read_bytes()).hexdigest()[:16]
    return NodeInfo(
        host=os.uname().nodename,
        address=address,
        rank=rank,
        workers=spec.workers,
        versions={
            "fsdplaunch": __version__,
            "torch": ".".join(map(str, version)) if version else "",
            "python": ".".join(platform.python_version_tuple()[:2]),
        },
        config=config_texts(spec.config),
        command=(*(["-m"] if target.is_module else []), target.name, *target.arguments),
        script=script,
        obstacles=spec.obstacles,
        port=probe.getsockname()[1],
    )


def config_texts(config: Config) -> dict[str, str]:
    """Return what nodes compare of their configurations; values of variables, which may be secret, as digests."""
    texts = {}
    for spec in all_keys():
        value = value_at(config, spec.path)
        if value not in (None, spec.default) and not spec.key.noise and not spec.key.per_node:
            texts[spec.dotted] = spec.key.kind.write(value)
    for name, value in config.launch.env.items():
        texts[f"launch.env.{name}"] = "#" + hashlib.sha256(value.encode()).hexdigest()[:8]
    texts.pop("launch.env", None)
    return texts


def check_interface(config: Config) -> None:
    """Raise a MachineError where the configured interface or address is not this node's."""
    asked, address = config.launch.network_interface, config.launch.local_address
    present = ", ".join(f"{name} ({own})" for name, own in network.interfaces().items())
    if asked is not None and asked not in network.interfaces():
        msg = f"launch.network_interface is {asked}, but this node ({os.uname().nodename}) has {present}"
        raise MachineError(msg, hint="name one of these, or leave it out")
    if address is not None and not network.is_own(address) and network.own_address_of(address) is None:
        where = f"this node ({os.uname().nodename})"
        msg = f"launch.local_address is {address}, which {where} does not have: {present}"
        raise MachineError(msg, hint="set it to one of these, or leave it out")


def _configured_address(config: Config) -> str | None:
    launch = config.launch
    if launch.local_address:
        return network.own_address_of(launch.local_address) or launch.local_address
    return network.interfaces().get(launch.network_interface) if launch.network_interface else None


def provisional_config(config: Config, place: NodePlacement, *, address: str) -> Config:
    """Return the configuration with all that is known before joining; `address` is node 0's or its stand-in."""
    store, rank = join_endpoint(place.host or address, place.port), place.rank or 0
    known = RunAssignment(run_id="", rank=rank, names=(), nodes=place.least, world=0, store=store, address="")
    return agreed_config(config, known)


def agreed_config(config: Config, assignment: RunAssignment) -> Config:
    """Return the configuration with what the nodes agreed on."""
    launch = replace(
        config.launch,
        rendezvous_endpoint=assignment.store,
        rendezvous_id=assignment.run_id or config.launch.rendezvous_id,
        local_address=assignment.address or config.launch.local_address,
    )
    return replace(
        config,
        num_machines=assignment.nodes,
        machine_rank=assignment.rank,
        main_process_ip=None,
        main_process_port=None,
        launch=launch,
    )
