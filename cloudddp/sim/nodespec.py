"""What a node has to be, and what a kind of node has to do: where the account's instances meet the hosts behind them.

Reads moto's objects, changes none; knows nothing of namespaces, processes or SSH.
"""

from __future__ import annotations

from base64 import b64decode
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from cloudddp.sim import userdata
from cloudddp.sim.aws import gpus
from cloudddp.sim.guest import log


@dataclass(frozen=True, slots=True)
class NodeSpec:
    """What a node has to be: one instance as the API describes it. Addresses are IPv4; keys are OpenSSH lines."""

    instance_id: str
    private_ip: str
    prefix_length: int
    mac: str
    public_ip: str | None
    gpus: tuple[tuple[str, int], ...]  # name, memory in MiB
    disk_gib: int
    login_keys: tuple[str, ...]
    user_data: userdata.UserData


class Nodes(Protocol):
    """A kind of node. Calls block, come from any thread, and never twice at once for one instance."""

    keeps_time: bool  # whether a node's own timers end it; else this room watches the deadlines
    on_end: Callable[[str, str], None]  # called with instance id and how: poweroff, reboot, crash

    def boot(self, spec: NodeSpec) -> None:
        """Return when the node is up; raise OSError or ValueError if it cannot be."""

    def halt(self, instance_id: str) -> None:
        """End every process of the node and stop answering; keep its files. Unknown nodes are no error."""

    def remove(self, instance_id: str) -> None:
        """As `halt`, and the files too."""

    def describe(self, instance_ids: list[str]) -> list[dict[str, Any]]:
        """What the backend knows of each node: ssh_port, home, processes (pids)."""


def spec_of(instance: Any) -> NodeSpec:
    """The node that moto's instance wants."""
    subnet = instance.ec2_backend.get_subnet(instance.subnet_id)
    pair = instance.ec2_backend.key_pairs.get(instance.key_name)
    try:
        user_data = userdata.parse(b64decode(str(instance.user_data or "")))
    except Exception as error:  # what PyYAML and zlib raise has no common name
        # cloud-init, too, boots a machine whose user data it cannot read.
        log.say(f"{instance.id}: {error}")
        user_data = userdata.UserData()
    material = pair.material_public if pair else b""
    key = material.decode() if isinstance(material, bytes) else str(material)
    return NodeSpec(
        instance_id=instance.id,
        private_ip=instance.private_ip,
        prefix_length=int(subnet.cidr_block.partition("/")[2]),
        mac=instance.nics[0].mac_address,
        public_ip=instance.public_ip,
        gpus=tuple(gpu if isinstance(gpu, tuple) else (gpu, 16384) for gpu in gpus(instance.instance_type)),
        disk_gib=_disk(instance),
        login_keys=tuple(filter(None, [key.strip(), *user_data.login_keys])),
        user_data=user_data,
    )


def _disk(instance: Any) -> int:
    """The size of the root volume, in GiB."""
    sizes = [
        mapping.size for mapping in instance.block_device_mapping.values() if getattr(mapping, "size", None)
    ]
    return int(sizes[0]) if sizes else 8
