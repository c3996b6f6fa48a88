"""Hosts on the lab's network, of one kind: each instance is a separate host with OpenSSH.

A kind (namespaces/, machines/) says how a node is built; this module boots it, attaches it to the network,
injects faults, and ends it.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import shutil
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Protocol

from cloudddp.simulator.guest import log, on_node
from cloudddp.simulator.hosts import lab_disk, node_process
from cloudddp.simulator.hosts.host_setup import HostSetup
from cloudddp.simulator.hosts.node_folder import nodes_folder
from cloudddp.simulator.hosts.node_spec import NodeSpec, calendar_time
from cloudddp.simulator.linux import kernel, processes
from cloudddp.simulator.net.policy import S3, S3_PORT
from cloudddp.simulator.net.router import Router, node_commands

_ENDINGS = {status: ending for ending, status in on_node.EXIT_STATUS.items()}
_SHRINKS = 50  # attempts, while a program writes to the disk


class HostKind(Protocol):
    """How the nodes of one kind are built and booted."""

    name: str  # of `--nodes`
    boot_module: str  # what node_process.boot runs
    shutdown_seconds: float  # in which a node has to power off when EC2 asks it to; 0: it is killed

    def describe(self, spec: NodeSpec, setup: HostSetup) -> str:
        """Return what `boot_module` reads from stdin, as one line: host_setup.to_line. Raises OSError."""

    def home(self, spec: NodeSpec) -> str:
        """Return the login user's home folder on the node."""

    def remove(self, instance_id: str) -> None:
        """Remove what a node that has ended may have left outside its folder."""


@dataclass(slots=True)
class _Host:
    """A node that is up."""

    spec: NodeSpec
    node: node_process.NodeProcess
    interface: str
    stopping: bool = False  # set before it is ended on request, so that its end is not reported


class LabHosts:
    """Implements host_backend.Hosts. Create it inside the lab's namespaces."""

    runs_timers = True

    def __init__(self, home: Path, router: Router, kind: HostKind, *, interfaces: tuple[str, ...]) -> None:
        self.on_end: Callable[[str, str], None] = lambda _id, _ending: None
        self._folder = nodes_folder(home)
        self._home = home
        self._router = router
        self._interfaces = interfaces
        self._kind = kind
        self._hosts: dict[str, _Host] = {}
        self._lock = threading.Lock()
        self._count = 0
        # By instance id, until the instance is removed:
        self._interface_names: dict[str, str] = {}
        self._addresses: dict[str, str] = {}
        self._disk_sizes: dict[str, int] = {}
        self._hosts_file = home / "sim" / "hosts"
        self._hosts_file.write_text("127.0.0.1 localhost\n")

    def boot(self, spec: NodeSpec) -> None:
        """Return when the node's pid 1 runs; its SSH server answers some time later. Raises OSError,
        ValueError."""
        folder = self._folder / spec.instance_id
        self._prepare(folder, spec)
        with self._lock:
            interface = self._interface_names.setdefault(
                spec.instance_id, self._interfaces[self._count % len(self._interfaces)]
            )
            self._count += 1
            self._addresses[spec.instance_id] = spec.private_ip
        host = self._start(folder, spec, interface)
        with self._lock:
            self._hosts[spec.instance_id] = host
            self._update_hosts_file()
        threading.Thread(
            target=self._await_end, args=(host,), name=f"wait {spec.instance_id}", daemon=True
        ).start()

    def halt(self, instance_id: str) -> None:
        """Power the node off, if its kind does that, end every process, and keep its disk. Raises
        TimeoutError."""
        with self._lock:
            host = self._hosts.pop(instance_id, None)
        if host is None:
            return
        host.stopping = True
        try:
            if not host.node.power_off(self._kind.shutdown_seconds):
                log.write(f"{instance_id} did not power off in {self._kind.shutdown_seconds:g} s: killed")
            host.node.kill()
        except TimeoutError as error:
            raise TimeoutError(f"{instance_id}: {error}") from None
        finally:
            self._router.detach(host.spec.private_ip)
            with self._lock:
                self._update_hosts_file()

    def remove(self, instance_id: str) -> None:
        """As `halt`, and remove its disk and its network faults."""
        self.halt(instance_id)
        self._kind.remove(instance_id)
        folder = self._folder / instance_id
        for name in ("disk", "state"):
            with contextlib.suppress(OSError):
                kernel.unmount(folder / name)
        shutil.rmtree(folder, ignore_errors=True)
        with self._lock:
            self._interface_names.pop(instance_id, None)
            self._disk_sizes.pop(instance_id, None)
            address = self._addresses.pop(instance_id, None)
        if address is not None:
            try:
                self._router.detach(address, heal=True)
            except OSError as error:
                log.write(f"{instance_id} is removed, but not its network fault: {error}")

    def describe(self, instance_ids: list[str]) -> list[dict[str, Any]]:
        """Return ssh_port, home (a path), interface and processes (pids) of each node."""
        pids = processes.by_node(self._home)
        found = []
        for instance_id in instance_ids:
            host = self._hosts.get(instance_id)
            found.append(
                {
                    "ssh_port": 22,
                    "home": f"/proc/{host.node.init.pid}/root{self._kind.home(host.spec)}" if host else "",
                    "interface": self._interface_names.get(instance_id, ""),
                    "processes": pids.get(instance_id, []) if host else [],
                }
            )
        return found

    def moved_deadline(self, instance_id: str) -> datetime | None:
        with contextlib.suppress(KeyError, OSError, ValueError):
            host = self._hosts[instance_id]
            units = Path(f"/proc/{host.node.init.pid}/root/etc/systemd/system")
            return calendar_time((units / host.spec.user_data.timer).read_text())
        return None

    # -- faults --------------------------------------------------------------------------------------------

    def kill(self, instance_id: str) -> None:
        """End the node as a hardware failure would: no signal to a process, no packet on a connection."""
        host = self._find(instance_id)
        # First, because the kernel closes the connections of dead processes.
        self._router.detach(host.spec.private_ip)
        host.node.init.kill()

    def freeze(self, instance_id: str) -> None:
        """Stop every process of the node; its connections stay open."""
        boot_process = self._find(instance_id).node.pid  # which reports the node's end
        try:
            processes.stop(self._home, instance_id, spare=boot_process)
        except TimeoutError as error:
            raise ValueError(f"{instance_id}: {error}") from None

    def thaw(self, instance_id: str) -> None:
        self._find(instance_id)
        processes.resume(self._home, instance_id)

    def fill_disk(self, instance_id: str) -> None:
        """Leave no free space on the node's disk, by shrinking it to what is on it. Raises ValueError if that
        does not stand still."""
        disk = self._folder / instance_id / "disk"
        for _ in range(_SHRINKS):
            usage = os.statvfs(disk)
            used = (usage.f_blocks - usage.f_bfree) * usage.f_frsize
            with contextlib.suppress(OSError):  # more has been written meanwhile
                kernel.mount("tmpfs", disk, "tmpfs", kernel.MS_REMOUNT, f"size={max(used, 4096)}")
                return
        raise ValueError(f"{instance_id}: a program there writes too fast to fill its disk")

    def restore_disk(self, instance_id: str) -> None:
        """Give a filled disk its size again."""
        self._find(instance_id)
        disk = self._folder / instance_id / "disk"
        kernel.mount("tmpfs", disk, "tmpfs", kernel.MS_REMOUNT, f"size={self._disk_sizes[instance_id]}")

    def _find(self, instance_id: str) -> _Host:
        host = self._hosts.get(instance_id)
        if host is None:
            raise ValueError(f"{instance_id} is not up")
        return host

    # -- booting -------------------------------------------------------------------------------------------

    def _prepare(self, folder: Path, spec: NodeSpec) -> None:
        """Mount the node's disk, and a folder with its description."""
        for name in ("disk", "state"):
            (folder / name).mkdir(mode=0o755, parents=True, exist_ok=True)
        if not os.path.ismount(folder / "disk"):
            size = self._disk_sizes[spec.instance_id] = lab_disk.size(spec.disk_gib << 30)
            options = lab_disk.tmpfs_options(size, "755")
            kernel.mount("tmpfs", folder / "disk", "tmpfs", kernel.MS_NODEV, options)
        # Not on this computer's disk: root of the node writes here, and could leave a setuid program. New at
        # each boot, which must not depend on what the node has left there.
        if os.path.ismount(folder / "state"):
            kernel.unmount(folder / "state")
        flags = kernel.MS_NOSUID | kernel.MS_NODEV | kernel.MS_NOEXEC
        kernel.mount("tmpfs", folder / "state", "tmpfs", flags, "mode=755,size=1m,nr_inodes=256")
        spec.write_facts(folder / "state")

    def _start(self, folder: Path, spec: NodeSpec, interface: str) -> _Host:
        def attach(pid: int) -> None:
            self._router.attach(pid, interface=interface, private=spec.private_ip, mac=spec.mac)

        try:
            node = node_process.boot(
                self._kind.boot_module,
                self._kind.describe(spec, self._setup(folder, spec, interface)),
                home=self._home,
                instance_id=spec.instance_id,
                log=folder / "boot.log",
                attach=attach,
            )
        except BaseException:
            self._router.detach(spec.private_ip)
            raise
        return _Host(spec, node, interface)

    def _setup(self, folder: Path, spec: NodeSpec, interface: str) -> HostSetup:
        network = ipaddress.ip_interface(f"{spec.private_ip}/{spec.prefix_length}").network
        commands = node_commands(
            interface=interface,
            private=spec.private_ip,
            prefix_length=spec.prefix_length,
            gateway=str(network.network_address + 1),
        )
        return HostSetup(
            host_name=_hostname(spec.private_ip),
            disk=folder / "disk",
            state=folder / "state",
            hosts_file=self._hosts_file,
            prefix=Path(sys.prefix),
            base_prefix=Path(sys.base_prefix),
            network_commands="\n".join(commands),
            environment={"AWS_ENDPOINT_URL_S3": f"http://{S3}:{S3_PORT}"},
        )

    def _await_end(self, host: _Host) -> None:
        status = host.node.wait()
        if host.stopping:
            return
        instance_id = host.spec.instance_id
        ending = _ENDINGS.get(status, "crash")
        if ending == "crash":
            log.write(f"{instance_id}: {node_process.last_line(self._folder / instance_id / 'boot.log')}")
        self.on_end(instance_id, ending)

    def _update_hosts_file(self) -> None:
        """Write the host names that the VPC's DNS would resolve, in place: this file is mounted on the
        nodes."""
        lines = ["127.0.0.1 localhost"]
        for host in self._hosts.values():
            private, name = host.spec.private_ip, _hostname(host.spec.private_ip)
            # PyTorch's sockets look up the IPv4-mapped address.
            lines += [f"{address} {name}.ec2.internal {name}" for address in (private, f"::ffff:{private}")]
        text = "".join(f"{line}\n" for line in lines).encode()
        try:
            with self._hosts_file.open("r+b", buffering=0) as file:
                os.pwrite(file.fileno(), text, 0)  # before truncating: a node may be reading
                file.truncate(len(text))
        except OSError as error:
            log.write(f"the nodes' /etc/hosts is out of date: {error}")


def _hostname(private_ip: str) -> str:
    return f"ip-{private_ip.replace('.', '-')}"
