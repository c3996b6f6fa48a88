"""Boots the machine node that is described on stdin: `python -m cloudddp.simulator.hosts.machines.boot`.

As node_process.boot expects it, it prints `namespaces ready`, waits for `network ready`, and runs
systemd-nspawn in a network and mount namespace of its own. Its exit status says how the machine has ended
(on_node.EXIT_STATUS). Standard library only.

The node's disk is the upper layer of an overlay over the root image. It is in memory (lab_hosts), and it
outlives a stop.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import IO, NamedTuple

from cloudddp.simulator.guest import log, on_node
from cloudddp.simulator.hosts import host_setup, python_environment
from cloudddp.simulator.hosts.host_setup import HostSetup
from cloudddp.simulator.hosts.machines import cgroups, layout
from cloudddp.simulator.hosts.machines.layout import Layout
from cloudddp.simulator.linux import kernel, processes

_START_SECONDS = 45.0  # until systemd-nspawn has started pid 1
_NSPAWN_STATUS = {0: "poweroff", 133: "reboot"}  # of systemd-nspawn --boot
_CONSOLE_BYTES = 512 << 10  # its folder has 1 MiB
_CONSOLE_LINES = 3  # in the reason of a failed start


class MachineNode(NamedTuple):
    """What to boot. `image` is the root file system, read-only."""

    setup: HostSetup
    instance_id: str
    image: Path
    layout: Layout

    @classmethod
    def from_line(cls, line: str) -> MachineNode:
        setup, own = host_setup.from_line(line)
        return cls(setup, own["instance_id"], Path(own["image"]), Layout(*own["layout"]))

    def to_line(self) -> str:
        return host_setup.to_line(**self._asdict())


def main() -> int:
    node = MachineNode.from_line(sys.stdin.readline())
    kernel.unshare(kernel.CLONE_NEWNET | kernel.CLONE_NEWNS)
    kernel.mount("none", Path("/"), flags=kernel.MS_REC | kernel.MS_PRIVATE)
    print("namespaces ready", flush=True)
    if sys.stdin.readline().strip() != "network ready":
        return 1
    subprocess.run(["ip", "-batch", "-"], input=node.setup.network_commands, text=True, check=True)
    root = _build(node)
    group = cgroups.enter(node.instance_id)
    try:
        process = subprocess.Popen(
            _command(node, root),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={**os.environ, "SYSTEMD_NSPAWN_UNIFIED_HIERARCHY": "1"},
            preexec_fn=lambda: kernel.die_with_parent(signal.SIGKILL),
        )
        console = node.setup.state / "console"
        reader = threading.Thread(target=_keep_beginning, args=(process.stdout, console), daemon=True)
        reader.start()
        pid = _init_of(process)
        if pid is None:
            process.kill()
            reader.join()
            lines = console.read_text(errors="replace").strip().splitlines()[-_CONSOLE_LINES:]
            error = " / ".join(lines) or "systemd-nspawn does not start"
            print(log.printable(error), file=sys.stderr, flush=True)
            return 1
        print(f"pid {pid} {process.pid}", flush=True)
        ending = _NSPAWN_STATUS.get(process.wait())
        return on_node.EXIT_STATUS[ending] if ending else 1
    finally:
        cgroups.leave(group)


def _keep_beginning(stream: IO[bytes], path: Path) -> None:
    """Read the console to its end, and keep its beginning: a machine whose console is not read stops."""
    with path.open("wb") as file:
        while data := os.read(stream.fileno(), 1 << 16):
            if file.tell() < _CONSOLE_BYTES:
                file.write(data)
                file.flush()


def _build(node: MachineNode) -> Path:
    """Mount the node's file system, and return its root. Raises OSError."""
    upper, work, root = (node.setup.disk / name for name in ("upper", "work", "root"))
    is_new = not upper.exists()
    for folder in (upper, work, root):
        folder.mkdir(mode=0o755, exist_ok=True)
    options = f"lowerdir={node.image},upperdir={upper},workdir={work}"
    kernel.mount("overlay", root, "overlay", options=options)
    if is_new:  # later, root of the node may have put links there that lead out of it
        layout.write(root, node.layout, environment=node.setup.environment, host_name=node.setup.host_name)
        if node.layout.pytorch:
            python_environment.create(
                root / python_environment.PYTORCH,
                Path("/", python_environment.PYTORCH),
                prefix=node.setup.prefix,
                base_prefix=node.setup.base_prefix,
                chown_to_user=_chown_to_user,
            )
        (root / "root").chmod(0o711)  # the computer's Python may be below its /root
    return root


def _chown_to_user(*paths: Path) -> None:
    for path in paths:
        os.chown(path, on_node.USER_ID, on_node.USER_ID, follow_symlinks=False)


def pythons(prefix: Path, base_prefix: Path, image: Path) -> list[Path]:
    """Return what a node needs of this computer's Python. Of an operating system's own, in /usr, these are
    the parts that the image lacks: it may have another version."""
    usr, version = Path("/usr"), f"python{sys.version_info.major}.{sys.version_info.minor}"
    parts = [usr / "bin" / version, usr / "lib" / version] if base_prefix == usr else []
    lacking = [one for one in parts if not (image / one.relative_to("/")).exists()]
    return [one for one in dict.fromkeys((base_prefix, prefix)) if one != usr] + lacking


def _command(node: MachineNode, root: Path) -> list[str]:
    return [
        *("systemd-nspawn", "--quiet", "--boot", "--register=no", "--keep-unit", "--console=read-only"),
        *(f"--directory={root}", f"--machine={node.instance_id}", f"--hostname={node.setup.host_name}"),
        "--capability=CAP_NET_ADMIN",  # of its own network namespace, in which this process is
        *("--resolv-conf=off", "--timezone=off", "--link-journal=no"),
        # sync(2) waits for all disks of this computer and cannot be killed, so a power-off at a deadline
        # would wait for other writers. The node's own disk is in memory.
        "--suppress-sync=yes",
        # Of pid 1, whose parent may be killed: by these marks it is found then.
        *(f"--setenv={name}={os.environ[name]}" for name in (processes.HOME_MARK, processes.NODE_MARK)),
        f"--bind-ro={node.setup.hosts_file}:/etc/hosts",
        *(f"--bind-ro={path}" for path in pythons(node.setup.prefix, node.setup.base_prefix, node.image)),
        "systemd.unified_cgroup_hierarchy=1",
    ]


def _init_of(process: subprocess.Popen[bytes]) -> int | None:
    """Return the machine's pid 1, a child of systemd-nspawn in a pid namespace of its own.

    None if nspawn ends or does not start it.
    """
    deadline = time.monotonic() + _START_SECONDS
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    while process.poll() is None and time.monotonic() < deadline:
        for pid in children.read_text().split():
            try:
                status = Path(f"/proc/{pid}/status").read_text()
            except OSError:
                continue
            if any(line.startswith("NSpid:") and line.split()[-1] == "1" for line in status.splitlines()):
                return int(pid)
        time.sleep(0.02)
    return None


if __name__ == "__main__":
    sys.exit(main())
