"""What `cloudddp top` costs the nodes and the network, and the record of readings a job: process nodes, each
with eight ranks that report their steps, and a stand-in for an nvidia-smi that shows eight GPUs.

What the real nvidia-smi costs is not measured here.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "tests"))

from support import nvidia

from bench.cluster import DIRECT
from bench.harness import Options, run, script, simulator, start

NODES, RANKS, SECONDS = 8, 8, 60.0
_TICKS = os.sysconf("SC_CLK_TCK")
_RANK = """
import json, os, time
step = 0
while True:
    step += 1
    reports = {"STEP": {"step": step, "work_seconds": 0.9}, "STATUS": {"step": step, "loss": 1 / step}}
    for name, report in reports.items():
        if path := os.environ.get(f"CLOUDDDP_{name}_FILE"):
            with open(path + ".tmp", "w") as file:
                json.dump(report, file)
            os.replace(path + ".tmp", path)
    time.sleep(1)
"""


def _agents(home: str) -> dict[int, int]:
    """Return the ticks of CPU time of the agent's processes on the nodes of a simulator, by pid."""
    found = {}
    for entry in Path("/proc").iterdir():
        try:
            words = (entry / "cmdline").read_bytes().decode(errors="replace") if entry.name.isdigit() else ""
            if home in words and words.endswith("\0serve\0"):
                fields = (entry / "stat").read_text().rsplit(")", 1)[1].split()
                found[int(entry.name)] = int(fields[11]) + int(fields[12])
        except OSError:
            continue
    return found


def _used(home: str, others: Collection[int] = ()) -> list[float]:
    """Return the CPU seconds that the agent's processes, but for `others`, use in the next SECONDS."""
    before = _agents(home)
    time.sleep(SECONDS)
    return [
        (ticks - before[pid]) / _TICKS
        for pid, ticks in _agents(home).items()
        if pid in before.keys() - others
    ]


def _received(pid: int) -> int:
    """Return the bytes that the open connections of a process have received."""
    lines = subprocess.run(["ss", "-tinpH"], capture_output=True, text=True, check=True).stdout.splitlines()
    pairs = zip(lines[::2], lines[1::2], strict=True)
    texts = [text for head, text in pairs if f"pid={pid}," in head]
    return sum(int(number) for text in texts for number in re.findall(r"bytes_received:(\d+)", text))


def bench_top(options: Options) -> None:  # noqa: ARG001  it has none
    """`cloudddp top` of 8 nodes with 8 ranks and 8 GPUs each: CPU time on the nodes, bytes."""
    print(f"top: {NODES} process nodes with {RANKS} ranks and 8 GPUs each, {SECONDS:.0f} s")
    with simulator() as env, tempfile.TemporaryDirectory() as folder:
        own = {**env, **DIRECT, "CLOUDDDP_NPROC_PER_NODE": str(RANKS), "CLOUDDDP_CLUSTER": "top"}
        (Path(folder) / "rank.py").write_text(_RANK)

        def cloudddp(*words: str) -> str:
            return run([script("cloudddp"), *words], env=own, cwd=folder)

        cloudddp("up", "-n", str(NODES), "-t", "g5.48xlarge")
        for line in cloudddp("exec", "--", "command -v nvidia-smi").splitlines():
            nvidia.install(Path(line.rpartition(" ")[2]).parent, 8)
        cloudddp("launch", "-d", "rank.py")
        time.sleep(20)  # the nodes are quiet again
        home = env["CLOUDDDP_HOME"]
        jobs, alone = _agents(home), _used(home)
        with tempfile.TemporaryFile() as out:
            process = start([script("cloudddp"), "top", "--json"], env=own, cwd=folder, stdout=out)
            time.sleep(10)
            before = _received(process.pid)
            steps = _used(home, jobs)
            received = _received(process.pid) - before
            process.kill()
            process.wait()
        cloudddp("cancel")
    for name, found in (("supervisor of the job", alone), ("step `readings`", steps)):
        most, share = max(found), 100 * max(found) / SECONDS
        print(f"  {name}: {len(found)} processes, at most {most:.2f} CPU s a minute, {share:.2f} % of a core")
    print(f"  received from all nodes: {received / SECONDS * 60 / 1e3:.0f} kB a minute")
