"""Machine nodes, as lab_hosts.HostKind."""

from __future__ import annotations

import sys
from pathlib import Path

from cloudddp.sim.hosts.lab_hosts import Place
from cloudddp.sim.hosts.machines import cgroups, root_image
from cloudddp.sim.hosts.machines.boot import Machine
from cloudddp.sim.hosts.machines.layout import Layout, layout_of
from cloudddp.sim.hosts.node_spec import NodeSpec


class Machines:
    boot_module = "cloudddp.sim.hosts.machines.boot"
    shutdown_seconds = 30.0  # EC2 waits for minutes; a shutdown takes 2 to 5 s here

    def __init__(self, home: Path) -> None:
        self._image = root_image.path(home)

    def describe(self, spec: NodeSpec, place: Place) -> str:
        return Machine(
            name=place.host_name,
            instance_id=spec.instance_id,
            image=self._image,
            disk=place.disk,
            state=place.state,
            hosts_file=place.hosts_file,
            prefix=Path(sys.prefix),
            base_prefix=Path(sys.base_prefix),
            network_commands=place.network_commands,
            environment=place.environment,
            layout=_layout(spec),
        ).to_json()

    def remove(self, instance_id: str) -> None:
        cgroups.clean_up([instance_id])  # where its boot process was killed

    def home(self, spec: NodeSpec) -> str:
        return f"/home/{_layout(spec).user}"


def _layout(spec: NodeSpec) -> Layout:
    return layout_of(
        spec.image_name, ssh_socket=bool(spec.boot.ssh_socket), nologin_seconds=spec.boot.nologin_seconds
    )
