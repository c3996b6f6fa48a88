"""`cloudddp sync` side by side with rsync, on namespace nodes: seconds, and bytes that the laptop sent.

`python -m bench sync --peers` starts a simulator and runs this file in its network with `cloudddp sim exec`. Contenders, each
with a folder of its own on every node, in turns:

    open       the transfer of `cloudddp sync`, in this process, over connections that are open
    cloudddp   the whole command, which starts Python, asks AWS and connects
    warm       one `rsync -a --delete` per node in parallel, over OpenSSH connections that are open (ControlMaster)
    cold       the same, each over a connection of its own
    relay      one rsync to node 0, then from there one per other node in parallel; all connections are open

Where a case sends files, every turn has new random content, and all contenders find nodes as new ones are: empty folders, and no
records of an earlier sync. The files are in the page cache, and the nodes' disks are memory: nothing has to reach a disk in
either.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # also run as a file

from bench import traffic
from bench.common import ROOT, replace_between, script, simulator

GB = 10**9
NODES = (1, 4, 8)
ROUND_TRIPS = (0, 50)  # milliseconds
MBIT = 200  # of a link with a round trip
TURNS = 3
CONTENDERS = ("open", "cloudddp", "warm", "cold", "relay")
_RECORDS = (
    ".cloudddp/manifest-project.json .cloudddp/digests-project.json"  # of cloudddp, of what it has synced
)
_SSH = ("-F", "none", "-o", "StrictHostKeyChecking=no", "-o", "UserKnownHostsFile=/dev/null", "-o", "LogLevel=ERROR")  # fmt: skip


@dataclass(frozen=True, slots=True)
class Case:
    """`files` of `size` bytes; `change`: None sends all of them, else so many are changed before each run."""

    files: int
    size: int
    change: int | None = None

    def contenders(self, nodes: int, milliseconds: int) -> tuple[str, ...]:
        """Return who takes part. A copy of 1 GB for each of many nodes takes minutes over a narrow link: there, `relay` is the
        better rsync."""
        is_long = self.files * self.size >= GB and nodes > 1 and milliseconds
        return ("open", "cloudddp", "relay") if is_long else CONTENDERS

    def turns(self, nodes: int, turns: int) -> int:
        return 1 if self.files * self.size >= GB and nodes >= 8 else turns


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
    done = subprocess.run(
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


def rsync(cluster: Cluster, source: Path, folder: str, *, warm: bool, nodes: int) -> None:
    shell = " ".join(cluster.ssh(warm=warm))
    addresses = cluster.public[:nodes]
    together(
        [
            ["rsync", "-a", "--delete", "-e", shell, f"{source}/", f"ubuntu@{one}:{folder}/"]
            for one in addresses
        ]
    )


def relay(cluster: Cluster, source: Path, folder: str) -> None:
    rsync(cluster, source, folder, warm=True, nodes=1)
    each = [f'rsync -a --delete -e "$s" {folder}/ {one}:{folder}/ & p="$p $!"' for one in cluster.private[1:]]
    if each:
        waiting = "for one in $p; do wait $one || exit 1; done"
        cluster.on(0, f"s='{cluster.from_node_0}'\n" + "\n".join([*each, waiting]))


def transfer(found: Any, runner: Any, settings: Any, source: Path) -> None:
    from cloudddp.job import sync

    sync.sync(runner, found, settings, root=source, progress=lambda _text: None)


def contenders(
    cluster: Cluster, opened: tuple[Any, Any, Any], source: Path
) -> dict[str, tuple[str, Callable[[], object]]]:
    """Return each contender's folder on the nodes, and how it is run."""
    count = len(cluster.public)
    return {
        "open": ("project", lambda: transfer(*opened, source)),
        "cloudddp": ("project", lambda: cluster.cloudddp("sync", cwd=source)),
        "warm": ("rsync-warm", lambda: rsync(cluster, source, "rsync-warm", warm=True, nodes=count)),
        "cold": ("rsync-cold", lambda: rsync(cluster, source, "rsync-cold", warm=False, nodes=count)),
        "relay": ("rsync-relay", lambda: relay(cluster, source, "rsync-relay")),
    }


def fill(source: Path, case: Case) -> None:
    """Write new random files into a new folder."""
    shutil.rmtree(source, ignore_errors=True)
    for number in range(case.files):
        path = source / f"d{number % 40}" / f"f{number}.bin"
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("wb") as file:
            for start in range(0, case.size, 1 << 24):
                file.write(os.urandom(min(1 << 24, case.size - start)))


def change(source: Path, count: int) -> None:
    """Change files, each time in another second: rsync takes a file of the same size and second for unchanged."""
    for path in sorted(source.glob("d*/*"))[:count]:
        before = path.stat()
        path.write_bytes(os.urandom(before.st_size))
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns + 1_000_000_000))


def check(cluster: Cluster, folder: str, source: Path, case: Case) -> None:
    """End the benchmark if a node lacks files, or has another version of the first one."""
    first = min(source.glob("d*/*"))
    names = f"find {folder} -type f | wc -l; sha256sum < {folder}/{first.relative_to(source)}"
    here = run(["sh", "-c", 'sha256sum < "$0"', str(first)])
    for rank, found in enumerate(cluster.everywhere(names)):
        if found != f"{case.files}\n{here}":
            raise SystemExit(f"node {rank} lacks files in {folder}: {found}")


def measure(
    cluster: Cluster,
    opened: tuple[Any, Any, Any],
    source: Path,
    case: Case,
    turns: int,
    names: Sequence[str],
) -> dict[str, list[tuple[float, int]]]:
    """Return (seconds, bytes sent by the laptop) of each turn, by contender."""
    found: dict[str, list[tuple[float, int]]] = {name: [] for name in names}
    every = contenders(cluster, opened, source)
    folders = " ".join(folder for folder, _ in every.values())
    cluster.everywhere(f"rm -rf {folders} {_RECORDS}")
    fill(source, case)
    if case.change is not None:
        for _, start in every.values():
            start()
    for turn in range(turns):
        if case.change is None and turn:
            fill(source, case)
        order = [*names[turn % len(names) :], *names[: turn % len(names)]]
        for name in order:
            folder, start = every[name]
            if case.change:
                change(source, case.change)  # for each: two of them have the same folder
            before, began = traffic.sent(), time.perf_counter()
            start()
            seconds = time.perf_counter() - began
            found[name].append((seconds, traffic.sent() - before))
            check(cluster, folder, source, case)
            if case.change is None:
                cluster.everywhere(f"rm -rf {folder} {_RECORDS}")  # also makes room: the disks are memory
    return found


def use_usual_congestion_control() -> str:
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


def rows(
    cases: Sequence[str], nodes: Sequence[int], round_trips: Sequence[int], turns: int
) -> Iterator[dict[str, Any]]:
    """Yield a row per case, number of nodes and round trip, as it is measured."""
    # Imported here because only this process, in the simulator's network, needs it.
    from cloudddp.cli import session
    from cloudddp.cli.console import Console
    from cloudddp.config.options import GlobalOptions
    from cloudddp.sim import control

    sim = control.find(Path(os.environ["CLOUDDDP_HOME"]))
    if sim is None:
        raise SystemExit("no simulator in CLOUDDDP_HOME")
    traffic.count()
    control_name = use_usual_congestion_control()
    for count in nodes:
        with tempfile.TemporaryDirectory(prefix="sync-") as folder:
            control.conditions(sim, {"link": None})
            cluster = Cluster(f"n{count}", count, Path(folder))
            os.environ.update(cluster.env)
            started = session.start(Console(), GlobalOptions())
            with started.connect() as (found, runner):
                opened = (found, runner, started.settings)
                for name in cases:
                    for milliseconds in round_trips:
                        far = {"latency": milliseconds / 1000, "mbit": MBIT} if milliseconds else None
                        # A connection that was opened over another link would begin with what TCP has learned there.
                        cluster.disconnect()
                        control.conditions(sim, {"link": None})
                        control.conditions(sim, {"link": far})
                        cluster.connect()
                        for rank in range(count):
                            runner.reconnect(rank)
                        case = CASES[name]
                        done = measure(
                            cluster,
                            opened,
                            Path(folder) / "files",
                            case,
                            case.turns(count, turns),
                            case.contenders(count, milliseconds),
                        )
                        yield {
                            "case": name,
                            "nodes": count,
                            "rtt": milliseconds,
                            "tcp": control_name,
                            "done": done,
                        }
            control.conditions(sim, {"link": None})
            cluster.end()


# -- outside -----------------------------------------------------------------------------------------------


def bench(
    *, cases: Sequence[str], nodes: Sequence[int], round_trips: Sequence[int], turns: int, write: bool
) -> None:
    """Print a line per case, and with `write` put the table into docs/benchmarks.md."""
    print(
        f"sync: cloudddp and rsync in turns; a round trip of 50 ms has {MBIT} Mbit/s; seconds, MB sent by the laptop"
    )
    head = ["RTT", "nodes", "files", *CONTENDERS, "open / better", "MB: open", "MB: warm", "MB: relay"]
    table = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    load, tcp = os.getloadavg()[0], ""
    print("  " + "  ".join(head))
    with simulator("namespace") as (found, env):
        inside = {**env, "CLOUDDDP_HOME": str(found.home), "PYTHONPATH": str(ROOT)}
        lists = [json.dumps(one) for one in (cases, nodes, round_trips, turns)]
        command = [script("cloudddp"), "sim", "exec", "--", sys.executable, str(Path(__file__)), *lists]
        process = subprocess.Popen(command, env=inside, stdout=subprocess.PIPE, text=True)
        with process:
            for text in process.stdout or ():
                row = json.loads(text)
                tcp, cells = row["tcp"], _cells(row)
                print("  " + "  ".join(cells), flush=True)
                table.append(f"| {' | '.join(cells)} |")
    if process.returncode:
        raise SystemExit(process.returncode)
    where = (
        f"medians of {turns} turns (1 of 1 GB to 8 nodes), {time.strftime('%Y-%m-%d')}, {os.cpu_count()} processors, {tcp}, load "
        f"average {load:.1f} before and {os.getloadavg()[0]:.1f} after."
    )
    print(f"  {where}")
    if write:
        page = ROOT / "docs" / "benchmarks.md"
        page.write_text(
            replace_between(page.read_text(), "python -m bench sync --peers", [where, "", *table])
        )


def _cells(row: dict[str, Any]) -> list[str]:
    """Return a row as text. The ratio is the median of the turns' ratios to the better one of `warm` and `relay`."""
    done: dict[str, list[list[float]]] = row["done"]
    seconds = {name: [turn[0] for turn in turns] for name, turns in done.items()}
    sent = {name: statistics.median(turn[1] for turn in turns) / 1e6 for name, turns in done.items()}
    rsyncs = [seconds[name] for name in ("warm", "relay") if name in seconds]
    better = [min(turn) for turn in zip(*rsyncs, strict=True)]
    ratios = [ours / other for ours, other in zip(seconds["open"], better, strict=True)]
    return [
        f"{row['rtt']} ms",
        str(row["nodes"]),
        TITLES[row["case"]],
        *(f"{statistics.median(seconds[name]):.2f} s" if name in seconds else "" for name in CONTENDERS),
        f"{statistics.median(ratios):.2f}",
        *(f"{sent[name]:.2f}" if name in sent else "" for name in ("open", "warm", "relay")),
    ]


def main() -> None:
    """In the simulator's network: print a line of JSON per row."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("cases", "nodes", "round_trips", "turns"):
        parser.add_argument(name, type=json.loads)
    for row in rows(**vars(parser.parse_args())):
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    sys.exit(main())
