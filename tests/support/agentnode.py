"""A stand-in for a node: a home folder with a project, in which the agent is run as over SSH."""

from __future__ import annotations

import atexit
import compileall
import functools
import io
import itertools
import json
import os
import random
import secrets
import selectors
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import zipfile
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar

from cloudddp.agent import program
from cloudddp.agent.client import Request, Step
from cloudddp.agent.protocol import ExitCode, codec
from cloudddp.agent.protocol.codec import MAX_REPLY, encode
from cloudddp.agent.protocol.frames import End, FollowRequest, Heartbeat, Log
from cloudddp.agent.protocol.gang import Gang
from cloudddp.agent.protocol.jobs import Failure, JobsRequest, JobState, KillReply, KillRequest, Verdict
from cloudddp.agent.protocol.machine import ProbeReply, ProbeRequest
from cloudddp.agent.protocol.phases import Peer
from cloudddp.agent.protocol.start import (
    NodeEnd,
    Process,
    SetupReply,
    SetupRequest,
    StartReply,
    StartRequest,
    Watch,
    Work,
)
from cloudddp.agent.replies import FrameDecoder, decode

T = TypeVar("T")

FOREVER = "import time\nwhile True: time.sleep(0.05)\n"
# It waits until `go` exists in the project.
WAITING = "import os, time\nwhile not os.path.exists('go'): time.sleep(0.02)\n"
_READY = "open('ready', 'w').close()\nprint('ready', flush=True)\n" + FOREVER
# It saves and ends with 143 when it is asked to end.
SAVES = f"""
import signal, sys, time
def save(*_):
    time.sleep(0.5)
    open("saved", "a").write("x")
    sys.exit(143)
signal.signal(signal.SIGTERM, save)
{_READY}"""
# It does not end when it is asked to.
STUBBORN = f"""
import signal
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
    signal.signal(number, signal.SIG_IGN)
{_READY}"""
HANG_GUARD = 300.0  # seconds; only a hang is this long


@functools.cache
def agent_file() -> Path:
    """Return the agent's folder, as `ship` unpacks it, built once for each test process, with byte code."""
    folder = tempfile.mkdtemp(prefix="cloudddp-agent-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    path = Path(folder) / "agent"
    with zipfile.ZipFile(io.BytesIO(program.archive())) as archive:
        archive.extractall(path)
    compileall.compile_dir(path, quiet=2)
    return path


def until(condition: Callable[[], T], seconds: float = HANG_GUARD) -> T:
    """Return the result of `condition` once it is true. The time limit only guards against hangs.

    A condition that takes long, because it starts a process, is looked at less often.
    """
    deadline = time.monotonic() + seconds
    while True:
        began = time.monotonic()
        if result := condition():
            return result
        assert time.monotonic() < deadline, "the condition did not become true in time"
        time.sleep(max(0.02, 2 * (time.monotonic() - began)))


def environ(pid: int) -> bytes:
    """Return the environment of a process that was started a moment ago. The kernel closes the pipe for which
    Popen waits before the new program has its environment, which must not be an empty one."""
    return until(Path(f"/proc/{pid}/environ").read_bytes)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except OSError:
        return False


def processes_of(home: Path) -> list[int]:
    """Return every process that was started with that home folder, without those that wait for steps."""
    mark = f"HOME={home}".encode()
    waiting = {process.pid for process in _waiting if process.poll() is None}
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) not in waiting:
            try:
                if mark in (entry / "environ").read_bytes().split(b"\0") and alive(int(entry.name)):
                    found.append(int(entry.name))
            except OSError:
                continue
    return found


def gone(home: Path) -> None:
    """Wait until no process with that home folder is left; fail with what the kernel says of the others."""
    deadline = time.monotonic() + HANG_GUARD
    while left := processes_of(home):
        assert time.monotonic() < deadline, "\n".join(map(described, left))
        time.sleep(0.05)


def described(pid: int) -> str:
    """Return the command line of a process, its parent, and which signals it blocks, ignores and handles."""
    folder = Path(f"/proc/{pid}")
    try:
        words = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        lines = (folder / "status").read_text().splitlines()
    except OSError:
        return f"{pid} is gone"
    wanted = ("State", "PPid", "Threads", "SigPnd", "ShdPnd", "SigBlk", "SigIgn", "SigCgt")
    return f"{pid} {words[-300:]}: {'; '.join(line for line in lines if line.startswith(wanted))}"


def free_port() -> int:
    """Return a port of 127.0.0.1 on which nobody listens, and which no connection gets as its own."""
    while True:
        port = random.randrange(10_000, 32_000)  # below the kernel's range of ephemeral ports
        with socket.socket() as listener:
            try:
                listener.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port


def gang_of(nodes: int = 1, *, silence: float = 15.0, join: float = 20.0, preflight: bool = False) -> Gang:
    """Return a gang of so many nodes, all of them on 127.0.0.1, with a new secret."""
    ports: dict[int, None] = {}
    while len(ports) < nodes:
        ports[free_port()] = None
    peers = tuple(Peer(node, "127.0.0.1", port) for node, port in enumerate(ports))
    return Gang(peers, secrets.token_hex(32), silence=silence, join=join, preflight=preflight)


class Refused(AssertionError):
    """A step failed; the text is what it wrote on stderr."""

    def __init__(self, done: subprocess.CompletedProcess[bytes]) -> None:
        super().__init__(done.stderr.decode(errors="replace"))
        self.exit_code = done.returncode


def new_mark() -> str:
    """Return the beginning of job ids that no other test uses."""
    return f"{secrets.randbelow(10**8):08}-{secrets.randbelow(10**6):06}"


_waiting: set[subprocess.Popen[bytes]] = set()  # processes of `Steps`


class Steps:
    """The agent's process that does one step after another, each in a fork, as the laptop uses it. A step in
    a process of its own would import the agent again."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process
        _waiting.add(process)

    def run(self, request: Step) -> subprocess.CompletedProcess[bytes]:
        """Do a step. `serve` exits after one that has failed: some of its input may be left."""
        process = self._process
        assert process.stdin is not None
        process.stdin.write(codec.ask(request.STEP, encode(request)))
        process.stdin.flush()
        written = {process.stdout: bytearray(), process.stderr: bytearray()}
        deadline = time.monotonic() + HANG_GUARD
        with selectors.DefaultSelector() as ready:
            for stream in written:
                ready.register(stream, selectors.EVENT_READ)
            while ready.get_map() and not self._has_ended(*written.values()):
                assert time.monotonic() < deadline, f"{request.STEP} has not ended"
                for key, _ in ready.select(1.0):
                    data = os.read(key.fd, 1 << 16)
                    written[key.fileobj] += data
                    if not data:
                        ready.unregister(key.fileobj)
        out, err = map(bytes, written.values())
        assert self._has_ended(out, err), (
            f"{request.STEP}: the agent has ended: {err.decode(errors='replace')}"
        )
        output, _, end = out.rpartition(b"\0")
        code = codec.read_stdout_end(b"\0" + end)
        if code:
            self.end()
        return subprocess.CompletedProcess(request.STEP, code, output, err.replace(codec.STDERR_END, b""))

    @staticmethod
    def _has_ended(out: bytes | bytearray, err: bytes | bytearray) -> bool:
        return codec.STDERR_END in err and out.endswith(b"\n") and out[out.rfind(b"\0") + 1 : -1].isdigit()

    @property
    def runs(self) -> bool:
        return self._process.poll() is None

    def end(self) -> None:
        self._process.kill()
        self._process.communicate()
        _waiting.discard(self._process)


class Node:
    """A home folder with a project in it, and the agent, called as over SSH."""

    def __init__(
        self,
        home: Path,
        python: str = sys.executable,
        agent: Path | None = None,
        *,
        number: int = 0,
        mark: str | None = None,
    ) -> None:
        """`number` is its rank among the nodes of a job; nodes that run the same job have the same `mark`."""
        self.home = home
        self.number = number
        self.python = python
        self.agent = agent or agent_file()
        self.metadata = ""  # host:port of the metadata service
        self.variables: dict[str, str] = {}  # of the login session
        self._steps: tuple[object, Steps] | None = None  # and the settings it was started with
        self.project = home / "p"
        self.project.mkdir(parents=True)
        self._numbers = itertools.count(1)
        self._mark = mark or new_mark()

    def id(self, job: str = "job-1") -> str:
        """Return a job id that no other test uses: unlike on real nodes, their jobs run on this machine,
        too."""
        return f"{self._mark}-{zlib.crc32(job.encode()) & 0xFFFF:04x}"

    @property
    def store(self) -> Path:
        return self.home / ".cloudddp"

    # -- steps ---------------------------------------------------------------------------------------------

    def popen(self, step: str, *arguments: str, **options: Any) -> subprocess.Popen[bytes]:
        environment = {k: v for k, v in os.environ.items() if not k.startswith("CLOUDDDP_")}
        return subprocess.Popen(
            [self.python, "-IS", "-X", "utf8", str(self.agent), step, *arguments],
            env={**environment, **self.variables, "HOME": str(self.home), "CLOUDDDP_METADATA": self.metadata},
            **{"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options},
        )

    def begin(self, request: Step) -> subprocess.Popen[bytes]:
        """Start a step and return its process."""
        process = self.popen(request.STEP)
        assert process.stdin is not None
        process.stdin.write(encode(request) + b"\n")
        process.stdin.close()
        process.stdin = None  # communicate() would flush it
        return process

    def send(self, step: str, data: bytes) -> subprocess.CompletedProcess[bytes]:
        """Run a step with these bytes on stdin."""
        process = self.popen(step)
        out, err = process.communicate(data, timeout=HANG_GUARD)
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)

    def run(self, request: Step) -> subprocess.CompletedProcess[bytes]:
        """Run a step in a process of its own."""
        return self.send(request.STEP, encode(request) + b"\n")

    def serve(self, request: Step) -> bytes:
        """Run a step in the node's `serve` process and return what it wrote. Raises Refused."""
        settings = self.python, self.agent, self.metadata, {**os.environ, **self.variables}
        if self._steps is None or self._steps[0] != settings or not self._steps[1].runs:
            self.end_steps()
            self._steps = settings, Steps(self.popen("serve"))
        done = self._steps[1].run(request)
        if done.returncode:
            raise Refused(done)
        return done.stdout

    def call(self, request: Request[T]) -> T:
        """Run a step and return its reply, as the laptop decodes it. Raises Refused."""
        kind: Any = request.REPLY
        reply: T = decode(self.serve(request).rstrip(), kind, limit=MAX_REPLY)
        return reply

    def probe(self, **changes: Any) -> ProbeReply:
        return self.call(ProbeRequest(**{"project": "p", "private_ip": "127.0.0.1", **changes}))

    # -- jobs ----------------------------------------------------------------------------------------------

    def script(self, code: str) -> str:
        name = f"script{next(self._numbers)}.py"
        (self.project / name).write_text(code)
        return name

    def setting_up(self, *commands: str, job: str = "job-1", **more: Any) -> SetupRequest:
        place: dict[str, Any] = {"node": self.number, "project": "p", "script": "script.py"}
        return SetupRequest(job=self.id(job), commands=commands, **place, **more)

    def set_up(self, *commands: str, **more: Any) -> SetupReply:
        return self.call(self.setting_up(*commands, **more))

    def start(self, *scripts: str, job: str = "job-1", **changes: Any) -> int:
        """Start one rank per script, as `rendezvous = "direct"` does; return the pid of the supervisor's
        guard."""
        self.call(self.starting(*scripts, job=job, **changes))
        return int(json.loads((self.folder(job) / "state.json").read_text())["guard"] or 0)

    def starting(
        self,
        *scripts: str,
        job: str = "job-1",
        grace: float = 20.0,
        processes: Sequence[Process] = (),
        ranks: int | None = None,
        first_rank: int = 0,
        max_restarts: int = 0,
        gang: Gang | None = None,
        **changes: Any,
    ) -> StartRequest:
        """Return the request that starts one rank per script, or these processes. The default is a gang of
        this node. `changes` are other fields of the request and of its parts."""
        direct = [
            Process(
                (), (sys.executable, self.script(code)), {"RANK": str(k + first_rank), "LOCAL_RANK": str(k)}
            )
            for k, code in enumerate(scripts)
        ]
        started = tuple(processes or direct)
        given = {"env": {}, **changes}

        def part(kind: type[Any], **own: Any) -> Any:
            names = [one.name for one in fields(kind) if one.name in given]
            return kind(**own, **{name: given.pop(name) for name in names})

        work = part(
            Work,
            script="script.py",
            processes=started,
            ranks=len(started) if ranks is None else ranks,
            max_restarts=max_restarts,
            stop_grace=grace,
        )
        return StartRequest(
            self.id(job), self.number, "p", gang or gang_of(1), work, part(Watch), part(NodeEnd), **given
        )

    def supervisor_pid(self, job: str = "job-1") -> int:
        """Return the pid of the job's supervisor, the child of the guard."""
        path = self.folder(job) / "state.json"
        return int(until(lambda: path.exists() and json.loads(path.read_text())["pid"]))

    def following(self, job: str = "job-1", **changes: Any) -> FollowRequest:
        return FollowRequest(**{"job": self.id(job), "wait": True, "heartbeat": 5.0, **changes})

    def follow(
        self, job: str = "job-1", *, wait: bool = True, offsets: dict[int, int] | None = None, **changes: Any
    ) -> Followed:
        return Followed(self.serve(self.following(job, wait=wait, offsets=offsets or {}, **changes)), offsets)

    def cancel(self, job: str = "job-1", *, grace: float = 20.0) -> KillReply:
        return self.call(KillRequest(self.id(job), grace, secrets.token_hex(8)))

    def jobs(self) -> tuple[JobState, ...]:
        return self.call(JobsRequest()).jobs

    def state(self, job: str = "job-1") -> JobState:
        (found,) = [one for one in self.jobs() if one.job == self.id(job)]
        return found

    def ended(self, job: str = "job-1") -> JobState:
        """Wait until a job has ended; return its state."""
        path = self.folder(job) / "state.json"
        until(lambda: path.exists() and json.loads(path.read_text()).get("ended"))
        return until(lambda: (found := self.state(job)).phase.ended and found)

    def folder(self, job: str = "job-1") -> Path:
        return self.store / "jobs" / self.id(job)

    def rank_pid(self, rank: int = 0, job: str = "job-1") -> int:
        path = self.folder(job) / "ranks" / f"{rank}.json"
        return int(until(lambda: path.exists() and json.loads(path.read_text())["pid"]))

    def end_steps(self) -> None:
        if self._steps is not None:
            self._steps[1].end()
            self._steps = None

    def end(self) -> list[int]:
        """Cancel every job; return the processes that are left, after they were killed."""
        self.end_steps()
        jobs = (self.store / "jobs").glob(f"{self._mark}-*") if processes_of(self.home) else ()
        for folder in jobs:
            request = KillRequest(folder.name, 0.0, secrets.token_hex(8))
            done = self.run(request)
            assert done.returncode in (0, ExitCode.OTHER_VERSION), done.stderr.decode()
        deadline = time.monotonic() + HANG_GUARD
        while (left := processes_of(self.home)) and time.monotonic() < deadline:
            time.sleep(0.02)  # a supervisor has recorded the end, and is about to exit
        return left


def first_of(found: JobState | Verdict) -> Failure:
    """Return what failed first in a job that has ended, by its verdict."""
    verdict = found.verdict if isinstance(found, JobState) else found
    assert verdict is not None
    assert verdict.first is not None
    return verdict.first


def start_together(requests: Mapping[Node, StartRequest]) -> dict[int, StartReply]:
    """Start a job on several nodes at once, as `launch` does; return the replies by the number of the
    node."""
    begun = [(node, node.begin(request)) for node, request in requests.items()]
    replies = {}
    for node, process in begun:
        out, err = process.communicate(timeout=HANG_GUARD)
        if process.returncode:
            raise Refused(subprocess.CompletedProcess(process.args, process.returncode, out, err))
        replies[node.number] = decode(out.rstrip(), StartReply)
    return replies


class Followed:
    """What `follow` wrote: the bytes of each rank's log, and the states in order."""

    def __init__(self, data: bytes, offsets: Mapping[int, int] | None = None) -> None:
        """`offsets`: where the logs were to be continued."""
        self.logs: dict[int, bytes] = {}
        self.starts: dict[int, int] = {}
        self.ends: dict[int, int] = dict(offsets or {})
        self.dropped: dict[int, list[tuple[int, int]]] = {}  # begin and end of what no longer existed
        self.states: list[JobState] = []
        self.heartbeats = 0
        self.ended = False
        for frame in FrameDecoder().feed(data):
            assert not self.ended, "a frame after the end"
            if isinstance(frame, Log):
                self.starts.setdefault(frame.rank, frame.offset)
                expected = self.ends.get(frame.rank, frame.offset)
                assert frame.offset >= expected, "a repetition"
                if frame.offset > expected:
                    self.dropped.setdefault(frame.rank, []).append((expected, frame.offset))
                self.logs[frame.rank] = self.logs.get(frame.rank, b"") + frame.data
                self.ends[frame.rank] = frame.end
            elif isinstance(frame, JobState):
                self.states.append(frame)
            elif isinstance(frame, Heartbeat):
                self.heartbeats += 1
            else:
                assert isinstance(frame, End)
                self.ended = True

    @property
    def state(self) -> JobState:
        return self.states[-1]

    @property
    def offsets(self) -> dict[int, int]:
        return dict(self.ends)
