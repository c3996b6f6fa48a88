"""Syncing to nodes of this machine, and pulling from them: the laptop's own code, with the agent run as over
SSH; and what their projects have."""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import shlex
import stat
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any, TypeVar

from support import streams
from support.agentnode import HANG_GUARD, agent_file
from support.instances import inventory_instance

from cloudddp.agent import program
from cloudddp.cluster.connect import PROJECT
from cloudddp.cluster.model import Cluster
from cloudddp.config.spec import Config, JobSpec
from cloudddp.errors import ConnectionLost
from cloudddp.job import sync
from cloudddp.job.project_files import of_config
from cloudddp.ssh.fleet import Outcome, each
from cloudddp.ssh.running import CommandSpec, Result
from cloudddp.tags import Tags

T = TypeVar("T")
UP_TO_DATE = "files are up to date"
RUNS = Config(job=JobSpec(outputs=("runs",)))


class LocalNode:
    """A home folder in which commands are run."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.project = home / PROJECT
        self.sent = 0  # bytes that the laptop has sent to `receive`
        self.processes: list[subprocess.Popen[bytes]] = []
        (home / ".cloudddp").mkdir(parents=True, mode=0o700, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            (home / program.agent_path()).symlink_to(agent_file())


class LocalRunner:
    """Carries commands to nodes of this machine. `limit` ends the input of a node after so many bytes."""

    def __init__(self, nodes: Mapping[int, LocalNode]) -> None:
        self.nodes = dict(nodes)
        self.limits: dict[int, int] = {}
        self.wrap: dict[int, str] = {}  # a program with arguments that runs the commands of a node
        self.on_piece: Callable[[int, bytes], None] = lambda _node, _piece: None
        self.on_probed: Callable[[], object] = lambda: None

    def connection(self, _node: int) -> None:
        """There is none: each step is a process of its own."""
        return

    def host_key(self, _node: int) -> str:
        return "ssh-ed25519 AAAA"

    def run(self, node: int, spec: CommandSpec) -> Result:
        local, command, stdin = self.nodes[node], spec.command, spec.stdin
        environment = {k: v for k, v in os.environ.items() if not k.startswith("CLOUDDDP_")}
        process = subprocess.Popen(
            [*shlex.split(self.wrap.get(node, "")), "sh", "-c", command],
            env={**environment, "HOME": str(local.home), "CLOUDDDP_METADATA": ""},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        local.processes.append(process)
        assert process.stdout is not None
        assert process.stderr is not None
        is_transfer = program.step_of(command) == "receive"
        if is_transfer:
            self.on_probed()
        with ThreadPoolExecutor(2) as readers:
            out = readers.submit(_drain, process.stdout, spec.on_stdout, process)
            err = readers.submit(_drain, process.stderr, spec.on_stderr, process)
            try:
                self._feed(
                    node, process, [stdin] if isinstance(stdin, bytes) else stdin, is_transfer=is_transfer
                )
                code = process.wait(HANG_GUARD)
            finally:
                process.kill()
        kept = out.result(), err.result()
        if code < 0:
            raise ConnectionLost(f"node {node}: the connection broke")
        return Result(code, *kept)

    def _feed(
        self, node: int, process: subprocess.Popen[bytes], pieces: Iterable[bytes], *, is_transfer: bool
    ) -> None:
        assert process.stdin is not None
        left = self.limits.get(node, 1 << 62) if is_transfer else 1 << 62
        try:
            for piece in pieces:
                process.stdin.write(piece[:left])
                process.stdin.flush()
                left -= len(piece)
                if is_transfer:
                    self.nodes[node].sent += len(piece)
                    self.on_piece(node, piece)
                if not piece:
                    time.sleep(0.005)
                if left <= 0 or (not piece and process.poll() is not None):
                    break
            process.stdin.close()
        except BrokenPipeError:
            pass

    def each(
        self, work: Callable[[int], T], *, nodes: Iterable[int] | None = None, **more: Any
    ) -> Outcome[T]:
        chosen = self.nodes if nodes is None else nodes
        return each({node: functools.partial(work, node) for node in chosen}, **more)

    def reconnect(self, node: int, wanted: Callable[[], bool] = lambda: True) -> None:
        """Nothing to do: there are no connections."""


def _drain(
    stream: IO[bytes], keep: Callable[[bytes], object] | None, process: subprocess.Popen[bytes]
) -> bytes:
    """Pass on what a process writes, or return it. An error of the receiver ends the process, as the end of
    its SSH channel does."""
    kept = bytearray()
    with stream:
        try:
            while data := os.read(stream.fileno(), 1 << 16):
                (keep or kept.extend)(data)
        except Exception:
            process.kill()
            raise
    return bytes(kept)


class LocalCluster:
    """Nodes of this machine that are synced with the laptop's own code."""

    def __init__(self, folder: Path, count: int = 1) -> None:
        self._folder = folder
        self._numbers = itertools.count()
        self.runner = LocalRunner({})
        for _ in range(count):
            self.add()

    def add(self) -> LocalNode:
        number = next(self._numbers)
        node = LocalNode(self._folder / f"node{number}")
        self.runner.nodes[number] = node
        return node

    @property
    def nodes(self) -> list[LocalNode]:
        return list(self.runner.nodes.values())

    @property
    def sent(self) -> int:
        """Bytes that the laptop has sent in transfers."""
        return sum(node.sent for node in self.nodes)

    @property
    def home(self) -> Path:
        """The home folder of the first node."""
        return self.nodes[0].home

    @property
    def project(self) -> Path:
        """The project on the first node."""
        return self.nodes[0].project

    def sync(self, here: Path, config: Config = RUNS) -> str:
        """Sync a folder to all nodes; return what the user gets to read."""
        lines: list[object] = []
        files = of_config(here, config)
        sync.sync(self.runner, self.cluster, config, files=files, progress=lines.append)
        return "; ".join(map(str, lines))

    @property
    def cluster(self) -> Cluster:
        members = {
            number: inventory_instance(f"i-{number}", Tags(), private_ip="127.0.0.1")
            for number in self.runner.nodes
        }
        return Cluster("c", "c-1", "us-east-1", members)


def put(folder: Path, files: dict[str, str | bytes]) -> None:
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())


def same(here: Path, there: Path) -> bool:
    """Whether two folders have the same files, all of which a sync transfers."""
    return there.exists() and tree(here) == tree(there)


def tree(root: Path) -> dict[str, Any]:
    """Return what a sync transfers of the files and links below a folder, without results."""
    return {
        name: data if stat.S_ISLNK(mode) else (data, bool(mode & 0o100), mtime_ns)
        for name, (mode, mtime_ns, data) in streams.tree(root).items()
        if not stat.S_ISDIR(mode) and not name.startswith("runs/")
    }
