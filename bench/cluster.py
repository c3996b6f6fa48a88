"""A cluster in the simulator's network, with OpenSSH connections beside those of cloudddp, and a link to it.

For what `rows_inside` runs.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench import traffic
from bench.harness import run, script

MBIT = 200  # of a link with a round trip
DIRECT = {"CLOUDDDP_RENDEZVOUS": "direct", "CLOUDDDP_NPROC_PER_NODE": "1"}  # for scripts without torch
_SSH = [
    *("ssh", "-F", "none", "-o", "LogLevel=ERROR"),
    *("-o", "StrictHostKeyChecking=no", "-o", "UserKnownHostsFile=/dev/null"),
]


@dataclass(frozen=True)
class Opened:
    """What a verb of cloudddp works with once it has connected."""

    found: Any
    runner: Any
    settings: Any


@contextmanager
def opened() -> Iterator[Opened]:
    """Connect as a verb of cloudddp does, in this process, with its current folder and environment."""
    # Imported here because the process outside of the simulator's network does not need it.
    from cloudddp.cli.console import Console
    from cloudddp.cli.session import start_session
    from cloudddp.operations.node_connections import connected

    started = start_session(Console())
    with connected(started) as (found, runner):
        yield Opened(found, runner, started.settings)


class Cluster:
    """Nodes that cloudddp has started, and OpenSSH connections to them; it ends with the `with` block.

    `folder` is a new project folder.
    """

    def __init__(self, nodes: int, folder: Path, **env: str) -> None:
        self.env = {**os.environ, "CLOUDDDP_CLUSTER": f"n{nodes}", "CLOUDDDP_SYNC_MAX_MB": "10000", **env}
        self._sockets, self.folder = folder, folder / "project"
        self.folder.mkdir()
        self.cloudddp("up", "-n", str(nodes), "-t", "g5.12xlarge")
        (found,) = json.loads(self.cloudddp("status", "--json"))
        self.public = [node["public_ip"] for node in found["nodes"]]
        self.private = [node["private_ip"] for node in found["nodes"]]
        (key,) = Path(self.env["CLOUDDDP_HOME"]).glob(f"clusters/{found['cluster_id']}*/id_ed25519")
        self._login = [*_SSH, "-i", str(key)]
        self.connect()
        self._connect_nodes()

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *_: object) -> None:
        self.disconnect()
        self.cloudddp("down")

    def cloudddp(self, *words: str, cwd: Path | None = None) -> str:
        return run([script("cloudddp"), *words], env=self.env, cwd=cwd or self.folder)

    @contextmanager
    def opened(self) -> Iterator[Opened]:
        os.environ.update(self.env)
        os.chdir(self.folder)
        with opened() as found:
            yield found
        os.chdir("/")

    # -- OpenSSH ---------------------------------------------------------------------------------------------

    def connect(self) -> None:
        """Open the connections from the laptop."""
        for rank in range(len(self.public)):
            subprocess.run([*self.ssh(rank), "-o", "ControlMaster=yes", "-fN"], check=True)

    def disconnect(self) -> None:
        for rank in range(len(self.public)):
            subprocess.run([*self.ssh(rank), "-O", "exit"], check=True, stderr=subprocess.DEVNULL)

    def shell(self, *, warm: bool) -> list[str]:
        """Return the OpenSSH command for any node; `warm`: over the connection that is open."""
        return [*self._login, "-o", f"ControlPath={self._sockets / '%h' if warm else 'none'}"]

    def ssh(self, rank: int, *, warm: bool = True) -> list[str]:
        return [*self.shell(warm=warm), f"ubuntu@{self.public[rank]}"]

    def on(self, rank: int, command: str) -> str:
        return run([*self.ssh(rank), command])

    def everywhere(self, command: str) -> list[str]:
        return [self.on(rank, command) for rank in range(len(self.public))]

    @property
    def from_node_0(self) -> str:
        return f"{' '.join(_SSH)} -i bench_key -o ControlPath=.ssh/bench-%h"

    def _connect_nodes(self) -> None:
        """Give node 0 a key for the others and open its connections, as a user would for many syncs."""
        make_key = "rm -f bench_key*; ssh-keygen -q -t ed25519 -N '' -f bench_key; cat bench_key.pub"
        public = self.on(0, make_key).strip()
        for rank, address in enumerate(self.private[1:], start=1):
            self.on(rank, f"echo '{public}' >> .ssh/authorized_keys")
            self.on(0, f"{self.from_node_0} -o ControlMaster=yes -fN {address} > /dev/null 2>&1")


def together(commands: Sequence[Sequence[str]]) -> None:
    """Run commands at the same time. Ends the benchmark if one fails."""
    started = [subprocess.Popen(command, stdin=subprocess.DEVNULL) for command in commands]
    codes = [one.wait() for one in started]
    if any(codes):
        raise SystemExit(f"exit codes {codes} of {commands}")


class Link:
    """The link between the laptop and the nodes, which is part of the simulator."""

    def __init__(self) -> None:
        from cloudddp.simulator import control  # only this process, in the simulator's network, needs it

        found = control.find(Path(os.environ["CLOUDDDP_HOME"]))
        if found is None:
            raise SystemExit("no simulator in CLOUDDDP_HOME")
        self._set: Callable[[dict[str, float] | None], object] = lambda wanted: control.conditions(
            found, {"link": wanted}
        )
        self.tcp = _use_usual_congestion_control()
        traffic.count()

    def be_near(self) -> None:
        """Have no round trip."""
        self._set(None)

    def be_far(self, milliseconds: int, cluster: Cluster, runner: Any, *, mbit: int = MBIT) -> None:
        """Have a round trip, if any. All connections are opened anew: those of another link would begin with
        what TCP has learned there."""
        cluster.disconnect()
        self._set(None)
        if milliseconds:
            self._set({"latency": milliseconds / 1000, "mbit": mbit})
        cluster.connect()
        for rank in range(len(cluster.public)):
            runner.reconnect(rank)


def _use_usual_congestion_control() -> str:
    """Let the laptop's TCP use cubic, Linux's default, or reno, which every namespace may use. Returns which.

    The computer's own may be bbr (version 1), of which several connections through one narrow link repeat up
    to a third of the bytes.
    """
    setting = Path("/proc/sys/net/ipv4/tcp_congestion_control")
    for name in ("cubic", "reno"):
        try:
            setting.write_text(name)
        except PermissionError:
            continue
        return name
    return setting.read_text().strip()
