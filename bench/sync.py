"""`cloudddp sync` side by side with rsync: seconds, and bytes that the laptop sent. Contenders:

open       the transfer of `cloudddp sync`, in this process, over connections that are open
cloudddp   the whole command, which starts Python, asks AWS and connects
warm       one `rsync -a --delete` per node in parallel, over OpenSSH connections that are open
(ControlMaster) cold       the same, each over a connection of its own
relay      one rsync to node 0, then from there one per other node in parallel; all connections are open
"""

from __future__ import annotations

import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from bench import traffic
from bench.cluster import MBIT, Cluster, Opened, opened, together
from bench.harness import Options, run, script, seconds_of, simulator
from bench.tables import ratios
from bench.transfers import CASES, FILL, Case, Row, Transfer, change_files, medians, report, seconds

CONTENDERS = ("open", "cloudddp", "warm", "cold", "relay")
# What cloudddp has recorded on a node about the files of an earlier sync.
_RECORDS = " ".join(f".cloudddp/{name}-project.json" for name in ("manifest", "pending"))


def fill(folder: Path, case: Case) -> None:
    """Write the random files of a case into a new folder."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    subprocess.run([sys.executable, "-c", FILL.format(case=case)], cwd=folder, check=True)


def sync(opened: Opened, source: Path) -> None:
    """Transfer a folder over connections that are open."""
    from cloudddp.job import sync
    from cloudddp.job.project_files import of_config

    files = of_config(source, opened.settings)
    sync.sync(opened.runner, opened.found, opened.settings, files=files, progress=lambda _text: None)


class Sync(Transfer):
    """From one folder of the laptop to folders of every node."""

    def __init__(self, cluster: Cluster, opened: Opened, memory: Path) -> None:
        super().__init__(cluster, opened, memory)
        self.source, count = memory / "files", len(cluster.public)
        self.start = {
            "open": lambda: sync(opened, self.source),
            "cloudddp": lambda: cluster.cloudddp("sync", cwd=self.source),
            "warm": lambda: self._rsync("warm", count, warm=True),
            "cold": lambda: self._rsync("cold", count, warm=False),
            "relay": self._relay,
        }

    def taking_part(self, case: Case, milliseconds: int) -> list[str]:
        """A copy of 1 GB for each of many nodes takes minutes over a narrow link: there, `relay` is the
        better rsync."""
        is_long = case.is_large and len(self.cluster.public) > 1 and milliseconds
        return ["open", "cloudddp", "relay"] if is_long else list(CONTENDERS)

    def fill(self, case: Case) -> None:
        fill(self.source, case)

    def change(self, count: int) -> None:
        change_files(self.source, count)

    def clear(self, contender: str) -> None:
        self.cluster.everywhere(f"rm -rf {_folder(contender)} {_RECORDS}")

    def check(self, contender: str, case: Case) -> None:
        """Every node has all files, and the same version of the first one."""
        folder, first = _folder(contender), min(self.source.glob("d*/*"))
        here = run(["sh", "-c", 'sha256sum < "$0"', str(first)])
        name = first.relative_to(self.source)
        found = self.cluster.everywhere(f"find {folder} -type f | wc -l; sha256sum < {folder}/{name}")
        if set(found) != {f"{case.files}\n{here}"}:
            raise SystemExit(f"{contender}: a node lacks files: {found}")

    def moved(self) -> int:
        return traffic.sent()

    def _rsync(self, contender: str, nodes: int, *, warm: bool) -> None:
        shell = " ".join(self.cluster.shell(warm=warm))
        options = ["rsync", "-a", "--delete", "-e", shell, f"{self.source}/"]
        addresses = self.cluster.public[:nodes]
        together([[*options, f"ubuntu@{address}:{_folder(contender)}/"] for address in addresses])

    def _relay(self) -> None:
        self._rsync("relay", 1, warm=True)
        copy = f'rsync -a --delete -e "$s" {_folder("relay")}/'
        each = [f'{copy} {one}:{_folder("relay")}/ & p="$p $!"' for one in self.cluster.private[1:]]
        if each:
            waiting = "for one in $p; do wait $one || exit 1; done"
            self.cluster.on(0, f"s='{self.cluster.from_node_0}'\n" + "\n".join([*each, waiting]))


def _folder(contender: str) -> str:
    """Return a contender's folder on the nodes."""
    return "project" if contender in ("open", "cloudddp") else f"rsync-{contender}"


def _cells(row: Row) -> list[str]:
    """Return a row as text. The ratio is the median of the turns' ratios to the better one of `warm` and
    `relay`."""
    middle = medians(row)
    rsyncs = [seconds(row, name) for name in ("warm", "relay") if name in middle]
    better = [min(turn) for turn in zip(*rsyncs, strict=True)]
    return [
        *(f"{middle[name][0]:.2f} s" if name in middle else "" for name in CONTENDERS),
        f"{statistics.median(ratios(seconds(row, 'open'), better)):.2f}",
        *(f"{middle[name][1] / 1e6:.2f}" if name in middle else "" for name in ("open", "warm", "relay")),
    ]


def bench_sync(options: Options) -> None:
    """Sync of 2,000 files to one simulated node, in seconds; with --peers, compared with rsync."""
    if options.peers:
        print(f"sync: cloudddp and rsync in turns; a round trip of 50 ms has {MBIT} Mbit/s; seconds, MB sent")
        head = [*CONTENDERS, "open / better", "MB: open", "MB: warm", "MB: relay"]
        name = "python -m bench sync --peers"
        report(name, Sync, head, _cells, options, cases=tuple(CASES), nodes=(1, 4, 8))
        return
    print("sync: 2,000 files of 4 KiB to one simulated node, over a connection that is open")
    with simulator() as env, tempfile.TemporaryDirectory() as folder:
        files = Path(folder) / "files"
        fill(files, CASES["2000"])
        run([script("cloudddp"), "up", "-n", "1"], env=env)
        os.environ.update(env)
        with opened() as found:
            for name in ("first", "unchanged"):
                print(f"  {name:<12} {seconds_of(lambda: sync(found, files)):.3f} s", flush=True)
