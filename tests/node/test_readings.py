"""What a node measures of its GPUs and ranks, how it is streamed, and how it is kept with a job."""

from __future__ import annotations

import math
import operator
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support import nvidia
from support.agentnode import Node, gone, until

from agent.jobs import rank_records
from agent.node import store
from agent.watch.gpus import Gpus, gpu_of
from agent.watch.measure import Measuring, RankZero, Recorder
from bench.report import event
from cloudddp.agent.protocol.jobs import JobState, RankRecord
from cloudddp.agent.protocol.readings import MAX_METRICS, READINGS_FILE, GpuReading, Reading, ReadingsRequest
from cloudddp.agent.replies import FrameDecoder, decode

REPORTS = """
import json, os, time
step = 0
print("reported\\n", flush=True)
while True:
    step += 1
    status = {"step": step, "loss": 0.5, "note": "x"}
    for name, report in {"STEP": {"step": step, "work_seconds": 0.25}, "STATUS": status}.items():
        if path := os.environ.get(f"CLOUDDDP_{name}_FILE"):
            with open(path + ".tmp", "w") as file:
                json.dump(report, file)
            os.replace(path + ".tmp", path)
    time.sleep(0.05)
"""
# Two processes, each of which uses a core.
BURNS = "import os\nos.fork()\nprint(flush=True)\nwhile True: pass"


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("0, 97, 71012, 81559, 61, 651.32, 40", GpuReading(0, 97, 71012, 81559, 61, 651.32, 40)),
        ("7,0,0,16384,30,35", GpuReading(7, 0, 0, 16384, 30, 35.0)),
        ("1, [N/A], 5, 6, [Not Supported], [Unknown Error]", GpuReading(1, None, 5, 6)),
        ("3, 1, 2, 3, 4, 5, 6, 7", GpuReading(3, 1, 2, 3, 4, 5, 6)),
        ("", None),
        ("-1, 1, 2, 3, 4, 5", None),
        ("[N/A], 1, 2, 3, 4, 5", None),
    ],
)
def test_line_of_nvidia_smi(line: str, found: GpuReading | None) -> None:
    assert gpu_of(line) == found


def test_gpu_that_is_no_longer_printed_is_not_shown() -> None:
    gpus, now = Gpus(1.0), time.monotonic()
    gpus._found.update({0: (now, GpuReading(0)), 1: (now - 12.0, GpuReading(1))})
    assert gpus.read() == (GpuReading(0),)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ('{"loss": 0.5, "step": 3, "lr": 1e-4}', {"loss": 0.5, "step": 3.0, "lr": 1e-4}),
        ('{"a": true, "b": "1", "c": null, "d": NaN, "f": [1], "g": 1}', {"d": None, "g": 1.0}),
        ('{"e": Infinity}', {"e": None}),
        ('{"huge": ' + "9" * 400 + ', "x": -1}', {"huge": None, "x": -1.0}),
        ("{" + ", ".join(f'"m{n}": {n}' for n in range(40)) + "}", {f"m{n}": float(n) for n in range(32)}),
        ("[1]", {}),
        ("not JSON", {}),
    ],
    ids=["numbers", "other types", "infinity", "a huge integer", "too many", "a list", "garbage"],
)
def test_metrics_are_the_numbers_of_the_status_file(
    tmp_path: Path, text: str, found: dict[str, float | None]
) -> None:
    (tmp_path / store.STATUS_FILE).write_text(text)
    assert rank_records.metrics(tmp_path) == found


def test_cores_of_a_rank_and_its_children(tmp_path: Path) -> None:
    (tmp_path / "ranks").mkdir()
    with subprocess.Popen([sys.executable, "-c", BURNS], stdout=subprocess.PIPE) as rank:
        assert rank.stdout is not None
        assert rank.stdout.read(2) == b"\n\n"
        both = [rank.pid, int(Path(f"/proc/{rank.pid}/task/{rank.pid}/children").read_text())]
        try:
            store.write(tmp_path / "ranks" / "3.json", RankRecord(3, None, None, pid=rank.pid))
            measuring, looks = Measuring(tmp_path, Gpus(1.0), 1.0), []

            def seconds() -> list[float]:
                """Return the CPU time of each."""
                times = [Path(f"/proc/{pid}/stat").read_text().rsplit(")")[1].split() for pid in both]
                return [(int(one[11]) + int(one[12])) / os.sysconf("SC_CLK_TCK") for one in times]

            def look() -> None:
                looks.append((time.monotonic(), sum(seconds())))

            look()
            (first,) = measuring.take().ranks
            look()
            wanted = [one + 0.25 for one in seconds()]  # however long that takes on a busy machine
            until(lambda: all(map(operator.ge, seconds(), wanted)))
            look()
            (second,) = measuring.take().ranks
            look()
        finally:
            for pid in both:
                os.kill(pid, signal.SIGKILL)
    times, used = zip(*looks, strict=True)
    low, high = (used[2] - used[1]) / (times[3] - times[0]), (used[3] - used[0]) / (times[2] - times[1])
    assert (first.rank, first.cores) == (3, None)
    assert second.cores is not None
    assert low - 0.01 <= second.cores <= high + 0.01  # rounded


@pytest.mark.parametrize(("age", "pause"), [(0.0, 1.0), (60.0, 3.0), (900.0, 10.0), (50_000.0, 100.0)])
def test_record_of_a_long_job_has_longer_pauses(tmp_path: Path, age: float, pause: float) -> None:
    recorder = Recorder(tmp_path, Gpus(1.0))
    recorder._began -= age
    before = time.monotonic()
    recorder.turn()
    assert before + pause <= recorder._due <= time.monotonic() + pause + 1.0
    recorder.turn()
    (line,) = (tmp_path / READINGS_FILE).read_bytes().splitlines()
    assert decode(line, Reading)


@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo, lambda path: path.symlink_to("/dev/full")])
def test_damaged_record_ends_no_job(tmp_path: Path, make: Any) -> None:
    make(tmp_path / READINGS_FILE)
    Recorder(tmp_path, Gpus(1.0)).turn()


def test_step_of_rank_zero_may_be_in_the_training_status(tmp_path: Path) -> None:
    (tmp_path / store.STATUS_FILE).write_text('{"step": 7}')
    measuring = Measuring(tmp_path, Gpus(1.0), 1.0)
    assert [measuring._rank(rank, None, None).step for rank in (0, 1)] == [7, None]


def test_what_rank_zero_shows_without_a_report(tmp_path: Path) -> None:
    """Of its event files only the ends are read: they may have any size, and be cut or no file at all."""
    job, project = tmp_path / "job", tmp_path / "project"
    (job / "ranks").mkdir(parents=True)
    (job / "began").touch()
    runs, now = project / "runs" / "deep", time.time()
    runs.mkdir(parents=True)
    nothing = Reading(now, metrics={"step": 1.0})
    zero = RankZero(job, project)
    assert zero.added(nothing) == nothing
    (job / "ranks" / "0.log").write_bytes(b"begin\nepoch 1:  10%\repoch 1:  20% \xff\r\n \n")
    huge = runs / "events.out.tfevents.1"
    with huge.open("wb") as file:
        file.write(event(1, at=now, old=1.0))
        file.truncate(1 << 40)
        file.seek(0, os.SEEK_END)
        file.writelines(event(step, at=now, loss=step / 4, lr=math.nan) for step in range(9))
        file.write(event(9, at=now, loss=9.0)[:30])
    (runs / "earlier.tfevents.2").write_bytes(event(1, at=now - 90, earlier=1.0))
    (runs / "many.tfevents.3").write_bytes(b"".join(event(n, at=now, **{f"m{n}": 1.0}) for n in range(99)))
    os.mkfifo(runs / "pipe.tfevents.4")
    (runs / "link.tfevents.5").symlink_to("/dev/zero")
    found = zero.added(nothing)
    assert (len(found.metrics), found.line) == (MAX_METRICS, "epoch 1:  20% \N{REPLACEMENT CHARACTER}")
    (runs / "many.tfevents.3").unlink()
    zero = RankZero(job, project)
    assert zero.added(nothing).metrics == {"loss": 2.0, "lr": None}
    with huge.open("ab") as file:
        file.write(event(9, at=now, loss=9.0)[30:])
    assert zero.added(nothing).metrics["loss"] == 9.0
    reported = replace(nothing, metrics={"step": 1.0, "loss": 3.0})
    assert zero.added(reported).metrics == reported.metrics


@pytest.fixture
def gpus(node: Node) -> None:
    folder = nvidia.install(node.home / "bin", 2).parent
    node.variables["PATH"] = f"{folder}:{os.environ['PATH']}"


@pytest.mark.usefixtures("gpus")
def test_readings_are_streamed_until_the_laptop_disconnects(node: Node) -> None:
    node.start(REPORTS, REPORTS)
    until((node.folder() / "steps" / "1.json").exists)
    until((node.folder() / store.STATUS_FILE).exists)
    step = node.begin(ReadingsRequest(0.2, "project"))
    assert step.stdout is not None
    frames, found = FrameDecoder(), []
    while sum(isinstance(one, Reading) for one in found) < 3:
        found += list(frames.feed(os.read(step.stdout.fileno(), 1 << 16)))
    state, *readings = found
    assert isinstance(state, JobState)
    assert state.job == node.id()
    last = [one for one in readings if isinstance(one, Reading)][-1]
    gpus = (GpuReading(n, 90 + n, 70000 + n, 81559, 61, 650.02 + n / 10, 40) for n in (0, 1))
    assert last.gpus == tuple(gpus)
    assert [(one.rank, one.seconds) for one in last.ranks] == [(0, 0.25), (1, 0.25)]
    assert all(one.cores is not None and (one.step or 0) > 1 for one in last.ranks)
    assert last.metrics["loss"] == 0.5
    assert (last.metrics["step"] or 0) > 1
    assert last.line == "reported"
    step.stdout.close()
    assert step.wait(10) == 0
    node.cancel(grace=0)
    gone(node.home)  # nvidia-smi, too
