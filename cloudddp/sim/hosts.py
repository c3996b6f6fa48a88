"""Namespace nodes: each instance a host of its own, with real OpenSSH, on the lab's network.

Needs Linux, `sshd`, `ip` and `nft`, and namespaces: root's, or those of an ordinary user. The node itself is
machine.py; this is what starts it, plugs it in, breaks it on request, and ends it.
"""

from __future__ import annotations

import compileall
import contextlib
import errno
import ipaddress
import json
import os
import select
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from cloudddp.sim import kernel, memory, processes, rootfs, router
from cloudddp.sim.guest import entry, here, log
from cloudddp.sim.nodespec import NodeSpec

_MADE_SECONDS = 20.0  # for a process to have its namespaces; only a machine that swaps takes so long
_END_SECONDS = 10.0  # for a node that was killed to be gone, before it is tried another way
_WORDS = {status: word for word, status in here.ENDS.items()}  # by which a node ends itself
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"  # what Ubuntu's PAM gives at login
_GUEST = Path(__file__).parent / "guest"
_SHIM = """#!{python} -IS
import sys
sys.path.insert(0, "/{guest}")
sys.argv[0] = {name!r}
from guest import entry
sys.exit(entry.main())
"""


@dataclass(slots=True)
class _Host:
    """A node that is up: the process that holds its namespaces, and its pid 1 as seen from here."""

    spec: NodeSpec
    process: subprocess.Popen[bytes]
    first: processes.Handle
    interface: str
    wanted: bool = True  # set to False by who ends it, so that its end is no surprise


class NamespaceNodes:
    """The node backend that is faithful; implements nodespec.Nodes. Make it inside the lab's namespaces."""

    keeps_time = True  # a node's own timers end it

    def __init__(self, home: Path, lab: router.Router, *, interfaces: tuple[str, ...], as_root: bool) -> None:
        self._folder = home / "sim" / "nodes"
        self._home = home
        self._router = lab
        self._interfaces = interfaces
        self._as_root = as_root
        self._hosts: dict[str, _Host] = {}
        self._lock = threading.Lock()
        self._count = 0
        self._names: dict[str, str] = {}  # instance -> its interface's name, for its whole life
        self._addresses: dict[str, str] = {}  # instance -> its private address, likewise
        self._sizes: dict[str, int] = {}  # instance -> bytes of its disk, likewise
        self.on_end: Callable[[str, str], None] = lambda _id, _how: None
        self._over = home / "sim" / "over"
        self._hosts_file = home / "sim" / "hosts"
        _lay_over(self._over)
        self._hosts_file.write_text("127.0.0.1 localhost\n")

    def boot(self, spec: NodeSpec) -> None:
        """Return when the node is switched on; its SSH answers some time later. Raises OSError, ValueError."""
        folder = self._folder / spec.instance_id
        self._prepare(folder, spec)
        with self._lock:
            interface = self._names.setdefault(
                spec.instance_id, self._interfaces[self._count % len(self._interfaces)]
            )
            self._count += 1
            self._addresses[spec.instance_id] = spec.private_ip
        host = self._switch_on(folder, spec, interface)
        with self._lock:
            self._hosts[spec.instance_id] = host
            self._write_names()
        threading.Thread(
            target=self._await_end, args=(host,), name=f"wait {spec.instance_id}", daemon=True
        ).start()

    def halt(self, instance_id: str) -> None:
        """End every process of the node; its disk stays. Raises TimeoutError where the kernel does not let it go."""
        with self._lock:
            host = self._hosts.pop(instance_id, None)
        if host is None:
            return
        host.wanted = False
        try:
            _end(host)
        finally:
            self._router.unplug(host.spec.private_ip)
            with self._lock:
                self._write_names()

    def remove(self, instance_id: str) -> None:
        """As `halt`, and its disk goes too, and what was broken of its network is nobody's any more."""
        self.halt(instance_id)
        folder = self._folder / instance_id
        for name in ("disk", "state"):
            with contextlib.suppress(OSError):
                kernel.unmount(folder / name)
        shutil.rmtree(folder, ignore_errors=True)
        with self._lock:
            self._names.pop(instance_id, None)
            self._sizes.pop(instance_id, None)
            address = self._addresses.pop(instance_id, None)
        if address is not None:
            try:
                self._router.unplug(address, for_good=True)
            except OSError as error:
                log.say(f"{instance_id} is gone, and a fault of it stays: {error}")

    def describe(self, instance_ids: list[str]) -> list[dict[str, Any]]:
        """For each: ssh_port, home (a path), interface, processes (pids)."""
        pids = processes.by_node(self._home)
        found = []
        for instance_id in instance_ids:
            host = self._hosts.get(instance_id)
            found.append(
                {
                    "ssh_port": 22,
                    "home": f"/proc/{host.first.pid}/root/home/{rootfs.USER}" if host else "",
                    "interface": self._names.get(instance_id, ""),
                    "processes": pids.get(instance_id, []) if host else [],
                }
            )
        return found

    # -- faults --------------------------------------------------------------------------------------------

    def kill(self, instance_id: str) -> None:
        """As if the machine under it had failed: no signal to any process, no last word on any connection."""
        host = self._host(instance_id)
        self._router.unplug(host.spec.private_ip)  # first: the kernel takes leave of every peer of the dead
        host.first.kill()

    def freeze(self, instance_id: str) -> None:
        """Stop every process of the node; its connections stay open and nobody answers on them."""
        machine_process = self._host(instance_id).process.pid  # it is who sees the node's end
        try:
            processes.stop(self._home, instance_id, spare=machine_process)
        except TimeoutError as error:
            raise ValueError(f"{instance_id} has {error}") from None

    def thaw(self, instance_id: str) -> None:
        self._host(instance_id)
        processes.resume(self._home, instance_id)

    def fill(self, instance_id: str) -> None:
        """Leave no room on the node's disk: it becomes as small as what is on it."""
        disk = self._folder / instance_id / "disk"
        usage = os.statvfs(disk)
        used = (usage.f_blocks - usage.f_bfree) * usage.f_frsize
        kernel.mount("tmpfs", disk, "tmpfs", kernel.REMOUNT, f"size={max(used, 4096)}")

    def drain(self, instance_id: str) -> None:
        """Give a filled disk its room again."""
        self._host(instance_id)
        disk = self._folder / instance_id / "disk"
        kernel.mount("tmpfs", disk, "tmpfs", kernel.REMOUNT, f"size={self._sizes[instance_id]}")

    def _host(self, instance_id: str) -> _Host:
        host = self._hosts.get(instance_id)
        if host is None:
            raise ValueError(f"{instance_id} is not up")
        return host

    # -- booting -------------------------------------------------------------------------------------------

    def _prepare(self, folder: Path, spec: NodeSpec) -> None:
        for name in ("disk", "state"):
            (folder / name).mkdir(mode=0o755, parents=True, exist_ok=True)
        if not os.path.ismount(folder / "disk"):
            size = self._sizes[spec.instance_id] = memory.for_disk(spec.disk_gib << 30)
            options = memory.limits(size, "755")
            kernel.mount("tmpfs", folder / "disk", "tmpfs", kernel.NO_DEVICES, options)
        # Not a folder of the host's: the node's root writes there, and could leave a setuid program behind. A new
        # one each time: who boots again must not find, or be stopped by, what was left there.
        if os.path.ismount(folder / "state"):
            kernel.unmount(folder / "state")
        quiet = kernel.NO_SUID | kernel.NO_DEVICES | kernel.NO_EXEC
        kernel.mount("tmpfs", folder / "state", "tmpfs", quiet, "mode=755,size=1m,nr_inodes=256")
        facts = {
            "instance_id": spec.instance_id,
            "gpus": [
                {"name": name, "memory_mib": memory, "seed": int(spec.instance_id[-8:], 16)}
                for name, memory in spec.gpus
            ],
            "cloud_config": spec.user_data.config,
            "script": spec.user_data.script,
            "login_keys": list(spec.login_keys),
        }
        (folder / "state" / "node.json").write_text(json.dumps(facts))

    def _switch_on(self, folder: Path, spec: NodeSpec, interface: str) -> _Host:
        network = ipaddress.ip_interface(f"{spec.private_ip}/{spec.prefix_length}").network
        wanted = rootfs.Machine(
            name=f"ip-{spec.private_ip.replace('.', '-')}",
            disk=folder / "disk",
            over=self._over,
            state=folder / "state",
            hosts=self._hosts_file,
            prefix=Path(sys.prefix),
            base=Path(sys.base_prefix),
            shared_memory=memory.for_shared_memory(),
            network="\n".join(
                router.node_commands(
                    interface=interface,
                    private=spec.private_ip,
                    prefix_length=spec.prefix_length,
                    gateway=str(network.network_address + 1),
                )
            ),
            environment={
                "PATH": _PATH,
                "PIP_TARGET": f"/home/{rootfs.USER}/.site-packages",
                "PYTHONPATH": f"/home/{rootfs.USER}/.site-packages",
            },
            as_root=self._as_root,
        )
        with (folder / "boot.log").open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-S", "-P", "-m", "cloudddp.sim.machine"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env={
                    "PATH": "/usr/sbin:/usr/bin:/sbin:/bin",
                    "PYTHONPATH": str(Path(__file__).parents[2]),
                    processes.HOME_MARK: str(self._home),
                    processes.NODE_MARK: spec.instance_id,
                },
                cwd="/",
                start_new_session=True,
            )
        try:
            _tell(process, wanted.to_json())
            _hear(process, "made")
            self._router.plug(process.pid, interface=interface, private=spec.private_ip, mac=spec.mac)
            _tell(process, "go")
            first = processes.Handle(int(_hear(process, "pid ")), parent=process.pid)
        except BaseException as error:
            if isinstance(error, ProcessLookupError):  # it has failed already, and is about to say why
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(_END_SECONDS)
            process.kill()
            process.wait()
            self._router.unplug(spec.private_ip)
            if isinstance(error, OSError):
                raise OSError(
                    error.errno or errno.EIO, f"{error}: {_last_line(folder / 'boot.log')}"
                ) from None
            raise
        return _Host(spec, process, first, interface)

    def _await_end(self, host: _Host) -> None:
        status = host.process.wait()
        host.first.close()
        if not host.wanted:
            return
        instance_id = host.spec.instance_id
        how = _WORDS.get(status, "crash")
        if how == "crash":
            why = _last_line(self._folder / instance_id / "boot.log")
            log.say(f"{instance_id}: {why}")
        self.on_end(instance_id, how)

    def _write_names(self) -> None:
        """What the VPC's own DNS would answer. Written in place: the nodes have this very file mounted."""
        lines = ["127.0.0.1 localhost"]
        for host in self._hosts.values():
            private = host.spec.private_ip
            name = f"ip-{private.replace('.', '-')}"
            # The second form is how PyTorch's sockets ask.
            lines += [f"{address} {name}.ec2.internal {name}" for address in (private, f"::ffff:{private}")]
        text = "".join(f"{line}\n" for line in lines).encode()
        try:
            with self._hosts_file.open("r+b", buffering=0) as file:
                os.pwrite(file.fileno(), text, 0)  # not emptied first: somebody may be reading
                file.truncate(len(text))
        except OSError as error:
            log.say(f"the nodes' names are out of date: {error}")


def missing() -> list[str]:
    """What has to be installed for namespace nodes, by the names of Debian's packages."""
    path = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
    wanted = {"sshd": "openssh-server", "ip": "iproute2", "nft": "nftables", "ssh-keygen": "openssh-client"}
    return [package for program, package in wanted.items() if shutil.which(program, path=path) is None]


def _lay_over(over: Path) -> None:
    """The stand-ins, as they lie over every node's /usr."""
    shutil.rmtree(over, ignore_errors=True)
    guest = over / rootfs.GUEST.relative_to("usr") / "guest"
    guest.mkdir(parents=True)
    for source in _GUEST.glob("*.py"):
        shutil.copy(source, guest / source.name)
    # Here, since a node's /usr is read-only: otherwise each of its commands compiles them again, half of its time.
    compileall.compile_dir(guest, quiet=2)
    for folder, names in (("bin", entry.BIN), ("sbin", entry.POWER)):
        (over / folder).mkdir()
        for name in names:
            path = over / folder / name
            path.write_text(_SHIM.format(python=_python(), guest=rootfs.GUEST, name=name))
            path.chmod(0o755)
    for path in (over, *over.rglob("*")):
        if path.is_dir():
            path.chmod(0o755)


def _python() -> str:
    return str(Path(sys.base_prefix) / "bin" / "python3")


def _tell(process: subprocess.Popen[bytes], line: str) -> None:
    stream: IO[bytes] | None = process.stdin
    assert stream is not None  # noqa: S101
    stream.write(line.encode() + b"\n")
    stream.flush()


def _hear(process: subprocess.Popen[bytes], word: str) -> str:
    """The rest of the line that begins with `word`. Raises OSError where something else, or nothing, comes."""
    stream = process.stdout
    assert stream is not None  # noqa: S101
    if not select.select([stream], [], [], _MADE_SECONDS)[0]:
        raise OSError(errno.ETIMEDOUT, "the machine does not come up")
    line = stream.readline().decode().rstrip("\n")
    if not line.startswith(word):
        raise OSError(errno.EIO, "the machine cannot be made")
    return line.removeprefix(word)


def _end(host: _Host) -> None:
    """SIGKILL to the node's pid 1, with which the kernel ends all the others; and if that takes too long, by way of
    the death of its parent. Raises TimeoutError.
    """
    host.first.kill()
    try:
        host.process.wait(_END_SECONDS)
    except subprocess.TimeoutExpired:
        host.process.kill()
        try:
            host.process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            raise TimeoutError(f"{host.spec.instance_id}: process {host.first.pid} does not end") from None


def _last_line(path: Path) -> str:
    try:
        lines = path.read_text(errors="replace").strip().splitlines()
    except OSError:
        lines = []
    return lines[-1] if lines else "no word why"
