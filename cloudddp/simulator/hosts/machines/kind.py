"""Machine nodes, as lab_hosts.HostKind."""

from __future__ import annotations

from pathlib import Path

from cloudddp.simulator.hosts.host_setup import HostSetup
from cloudddp.simulator.hosts.machines import cgroups, root_image
from cloudddp.simulator.hosts.machines.boot import MachineNode
from cloudddp.simulator.hosts.machines.layout import Layout, layout_of
from cloudddp.simulator.hosts.node_spec import NodeSpec


class Machines:
    name = "machine"
    boot_module = "cloudddp.simulator.hosts.machines.boot"
    shutdown_seconds = 30.0  # EC2 waits for minutes; a shutdown takes 2 to 5 s here

    def __init__(self, home: Path) -> None:
        self._image = root_image.path(home)

    def describe(self, spec: NodeSpec, setup: HostSetup) -> str:
        if not root_image.is_complete(self._image):
            raise OSError(
                f"the operating system {self._image} is missing or damaged: `cloudddp sim stop`, then "
                "`cloudddp sim start --nodes machine` makes a new one"
            )
        return MachineNode(setup, spec.instance_id, self._image, _layout(spec)).to_line()

    def remove(self, instance_id: str) -> None:
        cgroups.clean_up([instance_id])  # where its boot process was killed

    def home(self, spec: NodeSpec) -> str:
        return f"/home/{_layout(spec).user}"


def _layout(spec: NodeSpec) -> Layout:
    return layout_of(
        spec.image_name, ssh_socket=bool(spec.boot.ssh_socket), nologin_seconds=spec.boot.nologin_seconds
    )
