"""What the benchmarks of `sync` and `pull` share: cases, a cluster with open OpenSSH connections beside those of cloudddp, a link,
and the table.

Each of them is run twice: outside it starts a simulator, and prints what the same file prints in the simulator's network.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench import traffic
from bench.common import ROOT, replace_between, script, simulator

GB = 10**9
MBIT = 200  # of a link with a round trip
_SSH = ("-F", "none", "-o", "StrictHostKeyChecking=no", "-o", "UserKnownHostsFile=/dev/null", "-o", "LogLevel=ERROR")  # fmt: skip
_MEASURED = ("cases", "nodes", "round_trips", "turns")

Row = dict[str, Any]  # case, nodes, rtt, tcp, done: what was measured


@dataclass(frozen=True, slots=True)
class Case:
    """`files` of `size` bytes; `change`: None sends all of them, else so many are changed before each run."""

    files: int
    size: int
    change: int | None = None

    @property
    def is_large(self) -> bool:
        return self.files * self.size >= GB


CASES = {
    "2000": Case(2_000, 4096),
    "20000": Case(20_000, 4096),
    "1gb": Case(1, GB),
    "unchanged": Case(2_000, 4096, 0),
    "changed": Case(2_000, 4096, 1),
}
TITLES = {
    "2000": "2,000 x 4 KiB",
    "20000": "20,000 x 4 KiB",
    "1gb": "one file of 1 GB",
    "unchanged": "2,000 x 4 KiB, unchanged",
    "changed": "2,000 x 4 KiB, one changed",
}


# -- in the simulator's network ----------------------------------------------------------------------------


class Cluster:
    """`nodes` nodes that cloudddp has started, and OpenSSH connections to them."""

    def __init__(self, name: str, nodes: int, sockets: Path) -> None:
        self.env = {
            **os.environ,
            "CLOUDDDP_CLUSTER": name,
            "CLOUDDDP_YES": "1",
            "CLOUDDDP_SYNC_MAX_MB": "10000",
        }
        self._sockets = sockets
        self.cloudddp("up", "-n", str(nodes), "-t", "g5.12xlarge", cwd=sockets)
        (found,) = json.loads(self.cloudddp("status", "--json", cwd=sockets))
        self.public = [node["public_ip"] for node in found["nodes"]]
        self.private = [node["private_ip"] for node in found["nodes"]]
        (key,) = Path(self.env["CLOUDDDP_HOME"]).glob(f"clusters/{found['cluster_id']}*/id_ed25519")
        self._login = ["ssh", *_SSH, "-i", str(key)]
        self.connect()
        self._connect_nodes()

    def connect(self) -> None:
        """Open the connections from the laptop."""
        for address in self.public:
            command = [*self.ssh(warm=True), "-o", "ControlMaster=yes", "-fN", f"ubuntu@{address}"]
            subprocess.run(command, check=True)

    def disconnect(self) -> None:
        for address in self.public:
            subprocess.run(
                [*self.ssh(warm=True), "-O", "exit", f"ubuntu@{address}"],
                check=True,
                stderr=subprocess.DEVNULL,
            )

    def cloudddp(self, *words: str, cwd: Path) -> str:
        return run([script("cloudddp"), *words], env=self.env, cwd=cwd)

    def ssh(self, *, warm: bool) -> list[str]:
        path = f"{self._sockets}/%h" if warm else "none"
        return [*self._login, "-o", f"ControlPath={path}"]

    def on(self, rank: int, command: str) -> str:
        return run([*self.ssh(warm=True), f"ubuntu@{self.public[rank]}", command])

    def everywhere(self, command: str) -> list[str]:
        return [self.on(rank, command) for rank in range(len(self.public))]

    def _connect_nodes(self) -> None:
        """Give node 0 a key for the others and open its connections, as a careful user would for many syncs."""
        public = self.on(
            0, "rm -f bench_key*; ssh-keygen -q -t ed25519 -N '' -f bench_key; cat bench_key.pub"
        )
        for rank, address in enumerate(self.private[1:], start=1):
            self.on(rank, f"echo '{public.strip()}' >> .ssh/authorized_keys")
            self.on(0, f"{self.from_node_0} -o ControlMaster=yes -fN {address} > /dev/null 2>&1")

    @property
    def from_node_0(self) -> str:
        return f"ssh {' '.join(_SSH)} -i bench_key -o ControlPath=.ssh/bench-%h"

    def end(self) -> None:
        self.disconnect()
        self.cloudddp("down", cwd=self._sockets)


def run(command: Sequence[str], **more: Any) -> str:
    """Return the output. Ends the benchmark if the command fails."""
    done: subprocess.CompletedProcess[str] = subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False, **more
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(map(str, command))}: exit {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout


def together(commands: Sequence[Sequence[str]]) -> None:
    started = [subprocess.Popen(one, stdin=subprocess.DEVNULL) for one in commands]
    codes = [one.wait() for one in started]
    if any(codes):
        raise SystemExit(f"exit codes {codes} of {commands}")


class Link:
    """The link between the laptop and the nodes, which is part of the simulator."""

    def __init__(self) -> None:
        from cloudddp.sim import control  # only this process, in the simulator's network, needs it

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
        """Have a round trip, if any. All connections are opened anew: those of another link would begin with what TCP has
        learned there."""
        cluster.disconnect()
        self._set(None)
        if milliseconds:
            self._set({"latency": milliseconds / 1000, "mbit": mbit})
        cluster.connect()
        for rank in range(len(cluster.public)):
            runner.reconnect(rank)


def _use_usual_congestion_control() -> str:
    """Let the laptop's TCP use cubic, Linux's default, or reno, which every namespace may use. Returns which.

    The computer's own may be bbr (version 1), of which several connections through one narrow link repeat up to a third of
    the bytes.
    """
    setting = Path("/proc/sys/net/ipv4/tcp_congestion_control")
    for name in ("cubic", "reno"):
        try:
            setting.write_text(name)
        except PermissionError:
            continue
        return name
    return setting.read_text().strip()


def print_rows(rows: Callable[..., Iterator[Row]]) -> None:
    """In the simulator's network: print a line of JSON per row."""
    parser = argparse.ArgumentParser()
    for name in _MEASURED:
        parser.add_argument(name, type=json.loads)
    for row in rows(**vars(parser.parse_args())):
        print(json.dumps(row), flush=True)


# -- outside -----------------------------------------------------------------------------------------------


def report(
    name: str,
    file: str,
    head: Sequence[str],
    cells: Callable[[Row], list[str]],
    *,
    write: bool,
    **measured: Any,
) -> None:
    """Run the file in the network of a new simulator, print a line per row, and with `write` put the table between the comments
    `name` of docs/benchmarks.md."""
    table = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    load, tcp = os.getloadavg()[0], ""
    print("  " + "  ".join(head))
    with simulator("namespace") as (found, env):
        inside = {**env, "CLOUDDDP_HOME": str(found.home), "PYTHONPATH": str(ROOT)}
        lists = [json.dumps(measured[one]) for one in _MEASURED]
        command = [script("cloudddp"), "sim", "exec", "--", sys.executable, file, *lists]
        process = subprocess.Popen(command, env=inside, stdout=subprocess.PIPE, text=True)
        with process:
            for text in process.stdout or ():
                row = json.loads(text)
                tcp, found_cells = row["tcp"], cells(row)
                print("  " + "  ".join(found_cells), flush=True)
                table.append(f"| {' | '.join(found_cells)} |")
    if process.returncode:
        raise SystemExit(process.returncode)
    where = (
        f"medians of {measured['turns']} turns (1 of 1 GB), {time.strftime('%Y-%m-%d')}, {os.cpu_count()} processors, {tcp}, "
        f"load average {load:.1f} before and {os.getloadavg()[0]:.1f} after."
    )
    print(f"  {where}")
    if write:
        page = ROOT / "docs" / "benchmarks.md"
        page.write_text(replace_between(page.read_text(), name, [where, "", *table]))
