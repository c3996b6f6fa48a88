"""What the host of an instance has to be. Reads moto's objects and changes none."""

from __future__ import annotations

from base64 import b64decode
from dataclasses import dataclass
from typing import Any

from cloudddp.sim.conditions.model import Boot
from cloudddp.sim.ec2.catalog import CONDITIONS, gpus
from cloudddp.sim.guest import log
from cloudddp.sim.hosts import user_data


@dataclass(frozen=True, slots=True)
class NodeSpec:
    """One instance as the API describes it. Addresses are IPv4; keys are OpenSSH lines."""

    instance_id: str
    private_ip: str
    prefix_length: int
    mac: str
    public_ip: str | None
    gpus: tuple[tuple[str, int], ...]  # name, memory in MiB
    efa_devices: int
    disk_gib: int
    login_keys: tuple[str, ...]
    user_data: user_data.UserData
    boot: Boot


def spec_of(instance: Any) -> NodeSpec:
    """Return the specification for moto's instance."""
    subnet = instance.ec2_backend.get_subnet(instance.subnet_id)
    pair = instance.ec2_backend.key_pairs.get(instance.key_name)
    try:
        parsed = user_data.parse(b64decode(str(instance.user_data or "")))
    except Exception as error:  # what PyYAML and zlib raise has no common base class
        # cloud-init, too, boots a machine whose user data is invalid.
        log.write(f"{instance.id}: {error}")
        parsed = user_data.UserData()
    material = pair.material_public if pair else b""
    key = material.decode() if isinstance(material, bytes) else str(material)
    return NodeSpec(
        instance_id=instance.id,
        private_ip=instance.private_ip,
        prefix_length=int(subnet.cidr_block.partition("/")[2]),
        mac=instance.nics[0].mac_address,
        public_ip=instance.public_ip,
        gpus=tuple(gpus(instance.instance_type)),
        efa_devices=_efa_devices(instance),
        disk_gib=_root_volume_gib(instance),
        login_keys=tuple(filter(None, [key.strip(), *parsed.login_keys])),
        user_data=parsed,
        boot=CONDITIONS.read().next_boot,
    )


def _efa_devices(instance: Any) -> int:
    """Return how many EFA devices the node shows: its interfaces with EFA, unless a condition limits them."""
    attached = sum(nic.interface_type in ("efa", "efa-only") for nic in instance.nics.values())
    return min(attached, CONDITIONS.read().efa_devices.get(instance.instance_type, attached))


def _root_volume_gib(instance: Any) -> int:
    sizes = [
        mapping.size for mapping in instance.block_device_mapping.values() if getattr(mapping, "size", None)
    ]
    return int(sizes[0]) if sizes else 8
