"""What the host of an instance has to be, and its user data: host key, deadline, login keys, cloud-config.

Reads moto's objects and changes none, and executes nothing.
"""

from __future__ import annotations

import base64
import gzip
import json
import re
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path, PurePosixPath
from typing import Any

from cloudddp.simulator.conditions.model import Boot
from cloudddp.simulator.ec2.catalog import CONDITIONS, gpus
from cloudddp.simulator.ec2.key_pairs import public_key
from cloudddp.simulator.guest import cloud_init, log

_CALENDAR = re.compile(r"^\s*OnCalendar=(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d) UTC\s*$", re.MULTILINE)
_WRITTEN = re.compile(r"> *(/\S+)")


@dataclass(frozen=True, slots=True)
class UserData:
    """The parts that the simulator uses; empty if the user data does not have them."""

    host_key: str = ""  # private key, OpenSSH format
    login_keys: tuple[str, ...] = ()
    timer: str = ""  # name of the systemd timer that holds the deadline
    deadline: datetime | None = None
    config: dict[str, Any] = field(default_factory=dict)  # the whole cloud-config
    script: str = ""  # user data that is a script (#!)


@dataclass(frozen=True, slots=True)
class NodeSpec:
    """One instance as the API describes it. Addresses are IPv4; keys are OpenSSH lines."""

    instance_id: str
    image_name: str  # '' if the account does not have the image any more
    private_ip: str
    prefix_length: int
    mac: str
    public_ip: str | None
    gpus: tuple[tuple[str, int], ...]  # name, memory in MiB
    efa_devices: int
    disk_gib: int
    login_keys: tuple[str, ...]
    user_data: UserData
    boot: Boot

    def write_facts(self, folder: Path) -> None:
        """Write what on_node.facts and python_startup read on the node."""
        seed = int(self.instance_id[-8:], 16)
        facts = {
            "instance_id": self.instance_id,
            "gpus": [{"name": name, "memory_mib": mib, "seed": seed} for name, mib in self.gpus],
            "efa_devices": self.efa_devices,
            "cloud_config": self.user_data.config,
            "script": self.user_data.script,
            "login_keys": list(self.login_keys),
            "boot": asdict(self.boot),
        }
        (folder / "node.json").write_text(json.dumps(facts))
        (folder / "cold").unlink(missing_ok=True)
        if self.boot.first_import_seconds:
            (folder / "cold").write_text(str(self.boot.first_import_seconds))


def spec_of(instance: Any) -> NodeSpec:
    """Return the specification for moto's instance."""
    subnet = instance.ec2_backend.get_subnet(instance.subnet_id)
    try:
        parsed = parse(base64.b64decode(str(instance.user_data or "")))
    except Exception as error:  # what PyYAML and zlib raise has no common base class
        # cloud-init, too, boots a machine whose user data is invalid.
        log.write(f"{instance.id}: {error}")
        parsed = UserData()
    return NodeSpec(
        instance_id=instance.id,
        image_name=getattr(instance.ec2_backend.amis.get(instance.image_id), "name", "") or "",
        private_ip=instance.private_ip,
        prefix_length=int(subnet.cidr_block.partition("/")[2]),
        mac=instance.nics[0].mac_address,
        public_ip=instance.public_ip,
        gpus=tuple(gpus(instance.instance_type)),
        efa_devices=_efa_devices(instance),
        disk_gib=_root_volume_gib(instance),
        login_keys=tuple(filter(None, [public_key(instance), *parsed.login_keys])),
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


@lru_cache(maxsize=16)  # the nodes of one launch share it
def parse(raw: bytes) -> UserData:
    """Parse user data as cloud-init does; other formats than a script and a cloud-config are ignored.

    Raises ValueError for an invalid cloud-config.
    """
    if raw.startswith(b"\x1f\x8b"):
        raw = gzip.decompress(raw)
    if raw.startswith(b"#!"):
        return UserData(script=raw.decode(errors="surrogateescape"))
    if not raw.startswith(b"#cloud-config"):
        return UserData()
    config = _plain(_mapping(_load(raw)))
    timer, deadline = _deadline(config.get("write_files"), config.get("bootcmd"))
    return UserData(
        host_key=str(_mapping(config.get("ssh_keys")).get("ed25519_private") or ""),
        login_keys=tuple(str(key) for key in _sequence(config.get("ssh_authorized_keys"))),
        timer=timer,
        deadline=deadline,
        config=config,
    )


def _load(raw: bytes) -> Any:
    import yaml  # type: ignore[import-untyped]

    try:
        # JSON is YAML too, and this is a hundred times as fast as PyYAML.
        return json.loads(raw.partition(b"\n")[2])
    except ValueError:
        pass
    try:
        return yaml.safe_load(raw)
    except yaml.YAMLError as error:
        raise ValueError(f"invalid cloud-config: {error}") from error


def _plain(value: Any) -> Any:
    """Convert YAML's types to JSON's: the !!binary content of a file becomes base64, a date its text."""
    if isinstance(value, dict):
        if isinstance(value.get("content"), bytes):
            prefix = "gz+" if str(value.get("encoding", "")).lower() in ("gz", "gzip") else ""
            text = base64.b64encode(value["content"]).decode()
            value = {**value, "content": text, "encoding": f"{prefix}b64"}
        return {str(key): _plain(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(one) for one in value]
    if isinstance(value, bytes):
        return value.decode(errors="replace")
    return value if value is None or isinstance(value, (str, bool, int, float)) else str(value)


def _mapping(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _sequence(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _deadline(files: Any, commands: Any) -> tuple[str, datetime | None]:
    """Return name and time of the first timer that is written, by write_files or by a here-document in
    bootcmd."""
    written = [(str(entry.get("path", "")), entry) for entry in map(_mapping, _sequence(files))]
    for command in _sequence(commands):
        paths = _WRITTEN.findall(command) if isinstance(command, str) else []
        written += [(path, {"content": command}) for path in paths]
    for name, entry in written:
        path = PurePosixPath(name)
        if path.suffix != ".timer":
            continue
        if (found := calendar_time(cloud_init.content(entry).decode())) is not None:
            return path.name, found
    return "", None


def calendar_time(timer: str) -> datetime | None:
    """Return the time of a timer's OnCalendar=, if it is one."""
    found = _CALENDAR.search(timer)
    return datetime.strptime(found[1], "%Y-%m-%d %H:%M:%S").replace(tzinfo=UTC) if found else None
