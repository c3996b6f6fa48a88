"""`cloudddp pull` side by side with rsync: seconds, bytes that the laptop received, its processor time.
Contenders:

cloudddp   `cloudddp pull`, of all nodes with --all-nodes; it connects anew as every command does
open       the same transfer in this process, over connections that are open, with the agent that runs
warm       one `rsync -a` per node in parallel, over OpenSSH connections that are open (ControlMaster)
cold       the same, each over a connection of its own
"""

from __future__ import annotations

import shutil
import statistics
from pathlib import Path

from bench import traffic
from bench.cluster import MBIT, Cluster, Opened, together
from bench.harness import Options, run
from bench.tables import ratios
from bench.transfers import FILL, Case, Row, Transfer, medians, report, seconds

CONTENDERS = ("cloudddp", "open", "warm", "cold")


class Pull(Transfer):
    """From the folder `runs` of every node to a folder of the laptop for each contender."""

    def __init__(self, cluster: Cluster, opened: Opened, memory: Path) -> None:
        super().__init__(cluster, opened, memory)
        words = ("pull", "--all-nodes", "--to", str(memory / "cloudddp"), "runs")
        self.start = {
            "cloudddp": lambda: cluster.cloudddp(*words),
            "open": self._pull,
            "warm": lambda: self._rsync("warm", warm=True),
            "cold": lambda: self._rsync("cold", warm=False),
        }

    def fill(self, case: Case) -> None:
        go = "rm -rf project/runs; mkdir -p project/runs; cd project/runs"
        self.cluster.everywhere(f"{go}; python3 - <<'EOF'\n{FILL.format(case=case)}\nEOF")

    def clear(self, contender: str) -> None:
        shutil.rmtree(self.memory / contender, ignore_errors=True)

    def prepare(self, contender: str) -> None:
        """The questions of the command start the agent's process, which its transfer ends."""
        from cloudddp.agent.protocol.machine import ProbeRequest
        from cloudddp.cluster.connect import PROJECT, probe

        if contender == "open":
            probe(self.opened.runner, self.opened.found, ProbeRequest(PROJECT, "", only_files=True))

    def check(self, contender: str, case: Case) -> None:
        for rank, folder in enumerate(self._folders(contender)):
            found = [path.stat().st_size for path in (folder / "runs").glob("d*/*")]
            if found != [case.size] * case.files:
                raise SystemExit(f"{contender}: node {rank} has {len(found)} files instead of {case.files}")

    def moved(self) -> int:
        return traffic.received()

    def _folders(self, contender: str) -> list[Path]:
        to = self.memory / contender
        return [to, *(to / f"node{rank}" for rank in range(1, len(self.cluster.public)))]

    def _pull(self) -> None:
        from cloudddp.agent.protocol.file_steps import PackRequest
        from cloudddp.cluster.connect import PROJECT
        from cloudddp.job.results.pull import pull

        runner, folders, request = self.opened.runner, self._folders("open"), PackRequest(PROJECT, ("runs",))
        runner.each(lambda rank: pull(runner, request, node=rank, to=folders[rank])).all()

    def _rsync(self, contender: str, *, warm: bool) -> None:
        options = ["rsync", "-a", "-e", " ".join(self.cluster.shell(warm=warm))]
        folders = self._folders(contender)
        run(["mkdir", "-p", *folders])
        pairs = zip(self.cluster.public, folders, strict=True)
        together([[*options, f"ubuntu@{address}:project/runs", f"{to}/"] for address, to in pairs])


def _cells(row: Row) -> list[str]:
    """Return a row as text. The ratio is the median of the turns' ratios."""
    middle = medians(row)
    return [
        *(f"{middle[name][0]:.2f} s" for name in CONTENDERS),
        f"{statistics.median(ratios(seconds(row, 'open'), seconds(row, 'warm'))):.2f}",
        *(f"{middle[name][1] / 1e6:.2f}" for name in ("open", "warm")),
        *(f"{middle[name][2]:.2f} s" for name in ("open", "cold")),
    ]


def bench_pull(options: Options) -> None:
    """Pull from simulated nodes, compared with rsync."""
    print(f"pull: cloudddp and rsync in turns; a round trip of 50 ms has {MBIT} Mbit/s")
    head = [*CONTENDERS, "open / warm", "MB: open", "MB: warm", "CPU: open", "CPU: cold"]
    cases = ("2000", "20000", "1gb", "unchanged")
    report("python -m bench pull", Pull, head, _cells, options, cases=cases, nodes=(1, 4))
