"""What counts as activity of a rank, and the training status that rank 0 reports."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.agentnode import Node

from agent.jobs import rank_records
from agent.node import store
from agent.watch.gpus import Gpus
from agent.watch.stall import Activity, GpuLoad, gpu_load
from cloudddp.agent.protocol.jobs import RankRecord
from cloudddp.agent.protocol.progress import TrainingState
from cloudddp.agent.protocol.readings import GpuReading

# Uses as many ticks of CPU time as it is asked to, or reads 4 MiB.
WORKS = """
import os, sys
def ticks():
    return round(sum(os.times()[:2]) * os.sysconf('SC_CLK_TCK'))
for line in sys.stdin:
    if line == 'read\\n': open('/dev/zero', 'rb').read(4 << 20)
    until = ticks() + int(line) if line[0].isdigit() else 0
    while ticks() < until: pass
    print('done', flush=True)
"""


class Rank:
    """The only rank of a job, whose process waits for a line."""

    def __init__(self, folder: Path, child: subprocess.Popen[str]) -> None:
        self.folder, self._child = folder, child
        (folder / "ranks").mkdir()
        (folder / "ranks" / "0.log").write_text("began\n")
        self.log = folder / "ranks" / "0.log"

    def does(self, line: str) -> None:
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        self._child.stdin.write(f"{line}\n")
        assert self._child.stdout.readline() == "done\n"

    def start(self) -> None:
        store.write(self.folder / "ranks" / "0.json", RankRecord(0, None, None, pid=self._child.pid))


@pytest.fixture
def rank(tmp_path: Path) -> Iterator[Rank]:
    with subprocess.Popen(
        [sys.executable, "-c", WORKS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
    ) as child:
        found = Rank(tmp_path, child)
        found.does("1")
        yield found
        child.communicate()


def nothing(_: Rank) -> None:
    """A rank that waits."""


@pytest.mark.parametrize(
    ("act", "is_active"),
    [
        (nothing, False),
        (lambda rank: rank.does("1"), False),
        (lambda rank: rank.does("40"), True),
        (lambda rank: rank.does("read"), True),
        (lambda rank: rank.log.write_text("began\na line\n"), True),
        (lambda rank: (rank.folder / store.STATUS_FILE).write_text("{}"), True),
    ],
    ids=["nothing", "1 tick", "40 ticks", "io", "output", "status"],
)
def test_activity_of_a_rank(rank: Rank, act: Callable[[Rank], object], is_active: bool) -> None:
    """The kernel counts whole ticks of 10 ms: one in a short interval says nothing about a rank that only
    waits. Nor do two in this one, which the rank may need for a tick and the answer."""
    activity = Activity(rank.folder, 6.0, Gpus(6.0))
    interval = activity._interval
    activity.forget_output()
    rank.start()
    time.sleep(interval)
    assert activity.idle() > interval  # the first look at this process
    looked = time.monotonic()
    act(rank)
    time.sleep(max(interval - (time.monotonic() - looked), 0))
    assert (activity.idle() < interval) is is_active


def test_time_until_the_launcher_starts_its_ranks_is_no_stall(rank: Rank) -> None:
    """torchrun imports torch first, which takes long on a busy machine."""
    activity = Activity(rank.folder, 0.2, Gpus(0.2))
    activity.forget_output()
    time.sleep(0.4)
    assert activity.idle() < 0.2
    rank.start()
    activity.idle()
    time.sleep(0.4)
    assert activity.idle() > 0.2


@pytest.mark.parametrize(
    ("loads", "found"),
    [
        ([], GpuLoad(active=False, hung=False)),
        ([(0, 0), (5, 0)], GpuLoad(active=False, hung=False)),
        ([(None, None)], GpuLoad(active=False, hung=False)),
        ([(97, 40), (100, 0)], GpuLoad(active=True, hung=False)),
        ([(100, 40)], GpuLoad(active=True, hung=False)),
        ([(100, None)], GpuLoad(active=True, hung=False)),
        ([(100, 0), (0, 0), (99, 1)], GpuLoad(active=False, hung=True)),
    ],
)
def test_load_of_gpus(loads: list[tuple[float | None, float | None]], found: GpuLoad) -> None:
    """A collective that waits keeps the GPU at 100 %, and moves no data."""
    gpus = [GpuReading(at, load, memory_utilization=memory) for at, (load, memory) in enumerate(loads)]
    assert gpu_load(gpus) == found


# -- the training status: it reaches the laptop, and invalid values are dropped ------------------------------


SHOW = "import os\nprint(os.environ.get('CLOUDDDP_STATUS_FILE'))\n"


def test_only_rank_0_gets_a_status_file(node: Node) -> None:
    node.start(SHOW, SHOW)
    assert node.follow().logs == {0: f"{node.folder() / 'status.json'}\n".encode(), 1: b"None\n"}


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("", {}),
        ("no JSON", {}),
        ("[1, 2]", {}),
        ("[" * 16000, {}),
        ('{"step": 1, "x": "' + "x" * 20000 + '"}', {}),
        ('{"state": "\\u001b[2J", "step": 7}', {"step": 7}),
        ('{"step": true, "steps": "9", "best_accuracy": NaN, "state": 3}', {}),
        ('{"step": 1, "state": ["running"]}', {"step": 1}),
        (
            '{"step": 1' + "0" * 400 + ', "best_accuracy": Infinity, "state": "failed"}',
            {"state": TrainingState.FAILED},
        ),
        ('{"step": 1.5, "best_accuracy": 1}', {"best_accuracy": 1}),
    ],
    ids=["empty", "no JSON", "a list", "deep", "long", "control", "types", "state", "large", "kinds"],
)
def test_invalid_values_are_dropped(tmp_path: Path, text: str, left: dict[str, object]) -> None:
    (tmp_path / store.STATUS_FILE).write_text(text)
    found = rank_records.training_status(tmp_path)
    fields = vars(found) if found is not None else {}
    assert {k: v for k, v in fields.items() if k != "reported" and v is not None} == left
