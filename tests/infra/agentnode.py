"""A node without a machine: a home folder with a project, and the agent run in it as over SSH."""

from __future__ import annotations

import itertools
import json
import os
import secrets
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from cloudddp import payload
from cloudddp.frames import Frames
from cloudddp.protocol import JobState, Log

AGENT = payload.root() / "infra" / "node" / "agent.py"
FOREVER = "import time\nwhile True: time.sleep(0.05)\n"
HANG_GUARD = 60.0  # seconds; only a hang is this long


def until(condition: Callable[[], Any]) -> Any:
    """What `condition` gives once it is true."""
    patience = time.monotonic() + HANG_GUARD
    while not (answer := condition()):
        assert time.monotonic() < patience, "never came true"
        time.sleep(0.02)
    return answer


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except OSError:
        return False


def processes_of(home: Path) -> list[int]:
    """Every process that was started with that home folder."""
    mark = f"HOME={home}".encode()
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if mark in (entry / "environ").read_bytes().split(b"\0") and alive(int(entry.name)):
                    found.append(int(entry.name))
            except OSError:
                continue
    return found


class Node:
    """A home folder with a project in it, and the agent, called as over SSH."""

    def __init__(self, home: Path, python: str = sys.executable) -> None:
        self.home = home
        self.python = python
        self.project = home / "p"
        self.project.mkdir(parents=True)
        self._numbers = itertools.count(1)
        self._mark = secrets.token_hex(4)

    def id(self, job: str = "job-1") -> str:
        """A job's id: unlike on real nodes, those of other tests run on this machine at the same time."""
        return f"{self._mark}-{job}"

    def popen(self, *arguments: str, **options: Any) -> subprocess.Popen[bytes]:
        environment = {k: v for k, v in os.environ.items() if not k.startswith("CLOUDDDP_")}
        return subprocess.Popen(
            [self.python, "-I", "-X", "utf8", str(AGENT), *arguments],
            env={**environment, "HOME": str(self.home)},
            **{"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options},
        )

    def call(self, *arguments: str, stdin: Any = b"") -> subprocess.CompletedProcess[bytes]:
        data = stdin if isinstance(stdin, bytes) else json.dumps(stdin).encode()
        process = self.popen(*arguments)
        out, err = process.communicate(data, timeout=HANG_GUARD)
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)

    def answer(self, *arguments: str, stdin: Any = b"") -> Any:
        done = self.call(*arguments, stdin=stdin)
        assert done.returncode == 0, done.stderr.decode()
        return json.loads(done.stdout)

    # -- jobs ----------------------------------------------------------------------------------------------

    def script(self, code: str) -> str:
        name = f"script{next(self._numbers)}.py"
        (self.project / name).write_text(code)
        return name

    def start(
        self,
        *scripts: str,
        job: str = "job-1",
        env: dict[str, str] | None = None,
        grace: float = 20.0,
        processes: list[dict[str, Any]] | None = None,
        ranks: int | None = None,
    ) -> int:
        """Start one rank a script, as `rendezvous = "direct"` does; return the supervisor's pid."""
        direct = [
            {
                "argv": ["@RANK@", sys.executable, self.script(code)],
                "env": {"RANK": str(k), "LOCAL_RANK": str(k)},
            }
            for k, code in enumerate(scripts)
        ]
        wanted = processes or direct
        described = {
            "job": self.id(job),
            "node": 0,
            "project": "p",
            "script": "script.py",
            "env": env or {},
            "stop_grace": grace,
            "ranks": len(wanted) if ranks is None else ranks,
            "processes": wanted,
        }
        return int(self.answer("start", stdin=described)["pid"])

    def follow(
        self, job: str = "job-1", *, wait: bool = True, offsets: dict[int, int] | None = None
    ) -> Followed:
        arguments = ["follow", "--job", self.id(job), "--offsets", json.dumps(offsets or {})]
        done = self.call(*arguments, *(["--wait"] if wait else []))
        assert done.returncode == 0, done.stderr.decode()
        return Followed(done.stdout)

    def kill(self, job: str = "job-1", *arguments: str, grace: float = 20.0) -> Any:
        return self.answer("kill", "--job", self.id(job), "--grace", f"{grace}", *arguments)

    def state(self, job: str = "job-1") -> Any:
        (found,) = [one for one in self.answer("jobs") if one["job"] == self.id(job)]
        return found

    def folder(self, job: str = "job-1") -> Path:
        return self.home / ".cloudddp" / "jobs" / self.id(job)

    def rank_pid(self, rank: int = 0, job: str = "job-1") -> int:
        path = self.folder(job) / "ranks" / f"{rank}.json"
        return int(until(lambda: path.exists() and json.loads(path.read_text())["pid"]))


class Followed:
    """What `follow` wrote: the bytes of each rank's log, and the states in order."""

    def __init__(self, data: bytes) -> None:
        self.logs: dict[int, bytes] = {}
        self.starts: dict[int, int] = {}
        self.states: list[dict[str, Any]] = []
        self.ended = False
        for frame in Frames().feed(data):
            assert not self.ended, "a frame after the end"
            if isinstance(frame, Log):
                start = self.starts.setdefault(frame.rank, frame.offset)
                assert frame.offset == start + len(self.logs.get(frame.rank, b"")), "a gap or a repetition"
                self.logs[frame.rank] = self.logs.get(frame.rank, b"") + frame.data
            elif isinstance(frame, JobState):
                told = (
                    {key: value for key, value in asdict(frame.standing).items() if value is not None}
                    if frame.standing
                    else None
                )
                self.states.append({**asdict(frame), "standing": told})
            else:
                self.ended = True

    @property
    def state(self) -> dict[str, Any]:
        return self.states[-1]

    @property
    def offsets(self) -> dict[int, int]:
        return {rank: self.starts[rank] + len(body) for rank, body in self.logs.items()}
