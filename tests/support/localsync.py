"""Syncing to nodes of this machine: the laptop's own code, with the agent run as over SSH."""

from __future__ import annotations

import functools
import itertools
import os
import queue
import shlex
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from support.agentnode import HANG_GUARD, agent_file
from support.instances import inventory_instance

from cloudddp.agent import program
from cloudddp.cluster.connect import PROJECT
from cloudddp.cluster.model import Cluster
from cloudddp.config.spec import Config
from cloudddp.errors import NodeError
from cloudddp.job import sync
from cloudddp.job.project_files import of_config
from cloudddp.ssh.fleet import Outcome, each
from cloudddp.ssh.running import CommandSpec, Result
from cloudddp.tags import Tags

T = TypeVar("T")


class LocalNode:
    """A home folder in which commands are run."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.project = home / PROJECT
        self.sent = 0  # bytes that the laptop has sent to `receive`
        self.processes: list[subprocess.Popen[bytes]] = []
        (home / ".cloudddp").mkdir(parents=True, mode=0o700)
        shutil.copytree(agent_file(), home / program.agent_path())


class LocalRunner:
    """Carries commands to nodes of this machine. `limit` ends the input of a node after so many bytes."""

    def __init__(self, nodes: Mapping[int, LocalNode]) -> None:
        self.nodes = dict(nodes)
        self.limits: dict[int, int] = {}
        self.wrap: dict[int, str] = {}  # a program with arguments that runs the commands of a node
        self.on_sent: Callable[[int, int], None] = lambda _node, _sent: None
        self.on_piece: Callable[[int, bytes], None] = lambda _node, _piece: None
        self.on_probed: Callable[[], object] = lambda: None

    def connection(self, _node: int) -> None:
        """There is none: each step is a process of its own."""
        return

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
        kept: dict[str, bytearray] = {"out": bytearray(), "err": bytearray()}
        errors: queue.SimpleQueue[Exception] = queue.SimpleQueue()
        assert process.stdout is not None
        assert process.stderr is not None
        readers = [
            threading.Thread(
                target=_drain, args=(pipe.fileno(), keep or kept[name].extend, errors, process), daemon=True
            )
            for name, pipe, keep in (
                ("out", process.stdout, spec.on_stdout),
                ("err", process.stderr, spec.on_stderr),
            )
        ]
        for reader in readers:
            reader.start()
        is_transfer = program.step_of(command) == "receive"
        if is_transfer:
            self.on_probed()
        self._feed(node, process, [stdin] if isinstance(stdin, bytes) else stdin, is_transfer=is_transfer)
        for reader in readers:
            reader.join(HANG_GUARD)
        code = process.wait(HANG_GUARD)
        process.stdout.close()
        process.stderr.close()
        if not errors.empty():
            raise errors.get()
        if code < 0:
            raise NodeError(f"node {node}: the connection broke", reason=f"node {node}: the connection broke")
        return Result(code, bytes(kept["out"]), bytes(kept["err"]))

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
                    self.on_sent(node, self.nodes[node].sent)
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

    def host_key(self, node: int) -> str:
        raise NotImplementedError

    def expect(self, node: int, host_key: str) -> None:
        raise NotImplementedError

    def reconnect(self, node: int, wanted: Callable[[], bool] = lambda: True) -> None:
        """Nothing to do: there are no connections."""

    def close(self) -> None:
        """Nothing to do: there are no connections."""


def _drain(
    descriptor: int,
    keep: Callable[[bytes], object],
    errors: queue.SimpleQueue[Exception],
    process: subprocess.Popen[bytes],
) -> None:
    """Pass on what a process writes. An error of the receiver ends it, as the end of its SSH channel does."""
    while data := os.read(descriptor, 1 << 16):
        try:
            keep(data)
        except Exception as error:
            errors.put(error)
            process.kill()
            return


class LocalCluster:
    """Nodes of this machine that are synced with the laptop's own code."""

    def __init__(self, folder: Path, count: int, *, addresses: Sequence[str] = ()) -> None:
        self._folder = folder
        self._addresses = addresses
        self._numbers = itertools.count()
        self.runner = LocalRunner({})
        self.lines: list[str] = []
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

    def sync(self, here: Path, config: Config | None = None) -> list[str]:
        """Sync a folder to all nodes; return the lines that the user gets."""
        self.lines = []
        sync.sync(
            self.runner,
            self.cluster,
            config or Config(),
            files=of_config(here, config or Config()),
            progress=self._show,
        )
        return self.lines

    @property
    def cluster(self) -> Cluster:
        members = {
            number: inventory_instance(f"i-{number}", Tags(), private_ip=self._address(number))
            for number in self.runner.nodes
        }
        return Cluster("c", "c-1", "us-east-1", members)

    def _address(self, number: int) -> str:
        return self._addresses[number] if self._addresses else "127.0.0.1"

    def _show(self, text: str) -> None:
        self.lines.append(str(text))
