"""Namespace nodes, as lab_hosts.HostKind."""

from __future__ import annotations

import sys
from pathlib import Path

from cloudddp.sim.guest import on_node
from cloudddp.sim.hosts import lab_disk
from cloudddp.sim.hosts.lab_hosts import Place
from cloudddp.sim.hosts.namespaces import overlay, rootfs
from cloudddp.sim.hosts.node_spec import NodeSpec


class Namespaces:
    """`as_root`: whether root of the computer has started the simulator, and not an ordinary user."""

    boot_module = "cloudddp.sim.hosts.namespaces.boot"
    shutdown_seconds = 0.0

    def __init__(self, home: Path, *, as_root: bool) -> None:
        self._as_root = as_root
        self._overlay = home / "sim" / "overlay"
        overlay.create(self._overlay)

    def describe(self, _: NodeSpec, place: Place) -> str:
        return rootfs.Machine(
            name=place.host_name,
            disk=place.disk,
            overlay=self._overlay,
            state_folder=place.state,
            hosts_file=place.hosts_file,
            prefix=Path(sys.prefix),
            base_prefix=Path(sys.base_prefix),
            shared_memory=lab_disk.shared_memory_size(),
            network_commands=place.network_commands,
            environment={
                "PATH": on_node.SYSTEM_PATH,
                "PYTHONPATH": f"/{rootfs.PYTHON_STARTUP}",
                **place.environment,
            },
            as_root=self._as_root,
        ).to_json()

    def remove(self, instance_id: str) -> None:
        pass  # its namespaces end with it

    def home(self, _: NodeSpec) -> str:
        return f"/home/{rootfs.USER}"
