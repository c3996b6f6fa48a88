"""Namespace nodes, as lab_hosts.HostKind."""

from __future__ import annotations

from pathlib import Path

from cloudddp.simulator.guest import on_node
from cloudddp.simulator.hosts import lab_disk
from cloudddp.simulator.hosts.host_setup import HostSetup
from cloudddp.simulator.hosts.namespaces import overlay, rootfs
from cloudddp.simulator.hosts.node_spec import NodeSpec
from cloudddp.simulator.linux import kernel


class Namespaces:
    """`as_root`: whether root of the computer has started the simulator, and not an ordinary user."""

    name = "namespace"
    boot_module = "cloudddp.simulator.hosts.namespaces.boot"
    shutdown_seconds = 0.0

    def __init__(self, home: Path, *, as_root: bool) -> None:
        self._as_root = as_root
        self._overlay = home / "sim" / "overlay"
        overlay.create(self._overlay)
        self._shared = home / "sim" / "shared"
        self._shared.mkdir(exist_ok=True)
        options = lab_disk.tmpfs_options(lab_disk.size(1 << 40), "755")
        kernel.mount("tmpfs", self._shared, "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, options)

    def describe(self, _: NodeSpec, setup: HostSetup) -> str:
        own = {"PATH": on_node.SYSTEM_PATH, "PYTHONPATH": f"/{rootfs.PYTHON_STARTUP}"}
        return rootfs.NamespaceNode(
            setup._replace(environment={**own, **setup.environment}),
            self._overlay,
            self._shared,
            lab_disk.shared_memory_size(),
            self._as_root,
        ).to_line()

    def remove(self, instance_id: str) -> None:
        pass  # its namespaces end with it

    def home(self, _: NodeSpec) -> str:
        return f"/home/{rootfs.USER}"
