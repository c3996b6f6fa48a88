"""How fast a rank can write lines: into a plain file, and under the agent's wrapper with two limits of its log."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from cloudddp.agent import build
from cloudddp.agent.protocol import SUPERVISOR_VARIABLE

LINES = 10_000_000
RUNS = 5
JOB = "20260101-000000-beef"
_LOOP = """
import os, time
started = time.perf_counter()
for k in range({calls}): os.write(1, b'step %08d loss 0.12345678\\n' % k * {lines})
with open(os.environ["BENCH_RESULT"], "w") as file: file.write(str(time.perf_counter() - started))
"""
# A line per call, as print() does with PYTHONUNBUFFERED, and 100 lines per call: (script, lines).
CODES = {
    "a line per write": (_LOOP.format(calls=LINES // 10, lines=1), LINES // 10),
    "100 lines per write": (_LOOP.format(calls=LINES // 100, lines=100), LINES),
}
LIMITS = {"wrapper, limit 1 GiB": 1024, "wrapper, limit 1 MiB": 1}  # MiB


def rates(code: str, lines: int) -> dict[str, list[float]]:
    """Return the lines per second that the rank itself measured in several runs, in turns, by how it was started."""
    found: dict[str, list[float]] = {}
    for _ in range(RUNS):
        for name, limit in {"plain file": None, **LIMITS}.items():
            with tempfile.TemporaryDirectory() as folder:
                found.setdefault(name, []).append(lines / _seconds(Path(folder), code, limit))
    return found


def _born() -> str:
    """Return when this process started, as the agent records it of a supervisor."""
    return Path("/proc/self/stat").read_text().rsplit(")", 1)[1].split()[19]


def _seconds(folder: Path, code: str, limit: int | None) -> float:
    """Run the script, without the wrapper if `limit` is None."""
    result = folder / "seconds"
    own = {**os.environ, "HOME": str(folder), "RANK": "0", "BENCH_RESULT": str(result)}
    own[SUPERVISOR_VARIABLE] = f"{os.getpid()}:{_born()}"
    command = [sys.executable, "-c", code]
    if limit is not None:
        agent, job = folder / "agent.pyz", folder / ".cloudddp" / "jobs" / JOB
        agent.write_bytes(build.agent())
        (job / "ranks").mkdir(parents=True)
        (job / "job.json").write_text(json.dumps({"node": 0, "ranks": 1, "log_mb": limit}))
        command = [sys.executable, "-IS", str(agent), "rank", JOB, *command]
    with (folder / "log").open("ab") as log:
        subprocess.run(command, env=own, stdout=log, stderr=log, check=True)
    return float(result.read_text())
