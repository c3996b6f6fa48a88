"""`cloudddp report`: seconds and bytes for a job of 10,000 steps on 2 nodes with 8 ranks and GPUs each: a
reading every 2 s, and a line of metrics.jsonl and a record of TensorBoard's file for each step.
"""

from __future__ import annotations

import json
import math
import random
import struct
import tempfile
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from bench.harness import Options, compare, environment, script
from cloudddp.agent.protocol.codec import encode
from cloudddp.agent.protocol.gang import NodeFacts
from cloudddp.agent.protocol.jobs import Cause, Failure, Verdict
from cloudddp.agent.protocol.phases import JobPhase
from cloudddp.agent.protocol.progress import Straggler
from cloudddp.agent.protocol.readings import GpuReading, RankReading, Reading

JOB = "20261127-101500-be7c"
STEPS, SECONDS, NODES, RANKS = 10_000, 0.5, 2, 8
BEGAN = 1_700_000_000.0  # in the past, so that the files are newer
SLOW = 13


def event(step: int, at: float = BEGAN, **values: float) -> bytes:
    """Return a record of an event file, without its checksums."""
    summary = b""
    for name, value in values.items():
        tag = b"\x0a" + bytes([len(name)]) + name.encode() + b"\x15" + struct.pack("<f", value)
        summary += b"\x0a" + bytes([len(tag)]) + tag
    number = bytes([step & 127 | 128, step >> 7 & 127 | 128, step >> 14 & 127])
    data = b"\x09" + struct.pack("<d", at) + b"\x10" + number + b"\x2a" + bytes([len(summary)]) + summary
    return struct.pack("<QI", len(data), 0) + data + bytes(4)


def readings(node: int, draw: random.Random) -> Iterator[Reading]:
    for number in range(int(STEPS * SECONDS / 2)):
        at, step = BEGAN + 2 * number, int(2 * number / SECONDS)
        gpus = tuple(
            GpuReading(i, draw.randint(70, 100), 60_000 + 10 * i, 81_559, 55 + draw.randint(0, 9), 550.0 + i)
            for i in range(RANKS)
        )
        ranks = tuple(
            RankReading(
                r, 1.0, step, SECONDS * draw.uniform(0.9, 1.1) * (1.9 if r == SLOW and number > 1500 else 1)
            )
            for r in range(node * RANKS, (node + 1) * RANKS)
        )
        yield Reading(at, gpus, ranks, {"lr": 1e-3 * (1 - step / STEPS)} if node == 0 else {})


def fill(root: Path) -> Path:
    """Write the results of the job into a project; return their folder."""
    folder, draw = root / "results" / JOB, random.Random(1)
    first = Failure(1, Cause.RANK, rank=SLOW, exit_code=1)
    lines = (
        "Traceback (most recent call last):",
        '  File "train.py", line 80, in <module>',
        "RuntimeError: loss is nan",
    )
    end = BEGAN + STEPS * SECONDS
    verdict = Verdict(JobPhase.FAILED, 1, 0, first, lines, restarts=1, at=end)
    slow = Straggler(SLOW, 1, 0.95, 0.5, 6000, BEGAN + 3000, own=True)
    state = {"started": BEGAN, "ended": end, "restarts": 1, "script": "train.py --epochs 10"}
    for node in range(NODES):
        logs = folder / "cloudddp-logs" / f"node{node}"
        logs.mkdir(parents=True, exist_ok=True)
        with (logs / "readings.jsonl").open("wb") as file:
            file.writelines(encode(row) + b"\n" for row in readings(node, draw))
        for name, record in (
            (
                "verdict.json",
                asdict(verdict) | {"phase": "failed", "first": asdict(first) | {"cause": "rank"}},
            ),
            ("masked.json", {"last_lines": lines}),
            ("stragglers.json", {"known": [asdict(slow)]}),
            ("state.json", state),
            (
                "facts.json",
                asdict(NodeFacts("8 x NVIDIA H100", "570.1", "3.12.3", "2.8.0", "12.8", "2.27.3")),
            ),
        ):
            (logs / name).write_text(json.dumps(record))
    runs = folder / "runs"
    runs.mkdir(exist_ok=True)
    with (runs / "metrics.jsonl").open("w") as text, (runs / "events.out.tfevents.1.x").open("wb") as events:
        for step in range(STEPS):
            loss = 4 * math.exp(-step / 2500) + 0.4 + draw.uniform(-0.1, 0.1)
            text.write(
                json.dumps({"step": step, "loss": loss, "accuracy": 1 - loss / 5, "kind": "train"}) + "\n"
            )
            events.write(event(step, **{"grad/norm": loss * 2, "lr": 1e-3 * (1 - step / STEPS)}))
    return folder


def bench_report(_: Options) -> None:
    """`cloudddp report` about a job of 10,000 steps: seconds, and bytes of the page."""
    print(f"report: whole process, {STEPS:,} steps, {NODES} x {RANKS} ranks")
    with tempfile.TemporaryDirectory() as root:
        folder, config = fill(Path(root)), Path(root, "cloudddp.toml")
        config.touch()
        compare([[script("cloudddp"), "--config", str(config), "report", JOB]], environment(f"{root}/home"))
        print(f"{(folder / 'cloudddp-logs' / 'report.html').stat().st_size / 1e6:.2f} MB")
