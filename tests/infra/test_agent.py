"""The program on the node, run as it is there: real processes, real signals, its own files, nothing mocked."""

from __future__ import annotations

import importlib.util
import io
import itertools
import json
import os
import secrets
import shutil
import signal
import stat
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from cloudddp import payload
from cloudddp.watch import Frames

AGENT = payload.root() / "infra" / "node" / "agent.py"
FOREVER = "import time\nwhile True: time.sleep(0.05)\n"
HANG_GUARD = 60.0  # seconds; only a hang is this long

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the agent runs on Linux only (/proc)")


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
            if frame[0] == "log":
                _, rank, offset, body = frame
                start = self.starts.setdefault(rank, offset)
                assert offset == start + len(self.logs.get(rank, b"")), "a gap or a repetition"
                self.logs[rank] = self.logs.get(rank, b"") + body
            elif frame[0] == "state":
                self.states.append(frame[1])
            else:
                self.ended = True

    @property
    def state(self) -> dict[str, Any]:
        return self.states[-1]

    @property
    def offsets(self) -> dict[int, int]:
        return {rank: self.starts[rank] + len(body) for rank, body in self.logs.items()}


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    made = Node(tmp_path / "home")
    yield made
    for folder in (made.home / ".cloudddp" / "jobs").glob("*"):
        made.answer("kill", f"--job={folder.name}", "--cancel", "--grace=0")
    left = processes_of(made.home)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert left == []


# -- output ----------------------------------------------------------------------------------------------------


def test_every_line_of_a_rank_that_writes_much_and_exits_at_once_arrives(node: Node) -> None:
    code = "import os\nos.write(1, b''.join(b'line %06d\\n' % k for k in range(200_000)) + b'no newline')\n"
    piped = "import sys\nsys.stdout.write('\\n'.join(f'line {k:06d}' for k in range(200_000)))\n"
    node.start(code, piped)
    found = node.follow()
    lines = [b"line %06d" % k for k in range(200_000)]
    assert found.logs[0].split(b"\n") == [*lines, b"no newline"]
    assert found.logs[1].split(b"\n") == lines
    assert found.ended
    assert found.state["state"] == "succeeded"


def test_both_streams_of_a_rank_and_any_byte_arrive(node: Node) -> None:
    node.start("import os\nos.write(2, b'err\\xff\\x00\\r\\n')\nos.write(1, b'out\\n')\n")
    assert node.follow().logs[0] == b"err\xff\x00\r\nout\n"


def test_the_launchers_own_output_comes_apart_from_the_ranks(node: Node) -> None:
    argv = ["sh", "-c", 'echo launching; "$@"', "sh", "@RANK@", sys.executable, node.script("print('rank')")]
    node.start(processes=[{"argv": argv, "env": {"RANK": "3"}}])
    assert node.follow().logs == {-1: b"launching\n", 3: b"rank\n"}


def test_following_goes_on_where_it_was_without_loss_or_repetition(node: Node) -> None:
    gate = node.project / "gate"
    code = (
        "import os, time\nprint('one\\ntwo', flush=True)\nos.write(1, b'par')\n"
        "while not os.path.exists('gate'): time.sleep(0.02)\nprint('tial\\nlast')\n"
    )
    node.start(code)
    until(
        lambda: (
            (node.folder() / "ranks" / "0.log").exists()
            and node.follow(wait=False).logs.get(0, b"")[-3:] == b"par"
        )
    )
    first = node.follow(wait=False)
    assert first.logs == {0: b"one\ntwo\npar"}
    assert first.ended
    assert first.state["state"] == "running"
    gate.touch()
    second = node.follow(offsets=first.offsets)
    assert second.logs == {0: b"tial\nlast\n"}
    third = node.follow(offsets={**first.offsets, **second.offsets})
    assert third.logs == {}
    assert third.state["state"] == "succeeded"


def test_a_follower_whose_connection_broke_is_continued_by_another(node: Node) -> None:
    code = "import time\nfor k in range(3000):\n print(k, flush=True)\n if k % 100 == 0: time.sleep(0.02)\n"
    node.start(code)
    follower = node.popen("follow", "--job", node.id(), "--wait")
    assert follower.stdout is not None
    data = b""
    while data.count(b"\n") < 50:
        piece = os.read(follower.stdout.fileno(), 4096)
        assert piece
        data += piece
    follower.kill()
    follower.communicate(timeout=HANG_GUARD)
    seen = Followed(data)
    rest = node.follow(offsets=seen.offsets)
    assert (seen.logs.get(0, b"") + rest.logs.get(0, b"")).split() == [b"%d" % k for k in range(3000)]


def test_while_a_job_runs_its_followers_get_whole_lines_only(node: Node) -> None:
    code = (
        "import os, time\nos.write(1, b'whole\\nhalf')\n"
        "while not os.path.exists('gate'): time.sleep(0.02)\nos.write(1, b' and half\\n')\n"
    )
    node.start(code)
    log = node.folder() / "ranks" / "0.log"
    until(lambda: log.exists() and log.read_bytes().endswith(b"half"))
    follower = node.popen("follow", "--job", node.id(), "--wait")
    assert follower.stdout is not None
    data = b""
    while b"whole\n" not in data:
        data += os.read(follower.stdout.fileno(), 4096)
    assert b"half" not in data
    (node.project / "gate").touch()
    data += follower.communicate(timeout=HANG_GUARD)[0]
    assert Followed(data).logs == {0: b"whole\nhalf and half\n"}


def test_a_follower_that_came_first_sees_the_job_to_its_end(node: Node) -> None:
    node.start("import os, time\nwhile not os.path.exists('gate'): time.sleep(0.02)\nprint('done')\n")
    follower = node.popen("follow", "--job", node.id(), "--wait")
    assert follower.stdout is not None
    data = b""
    while b"state " not in data:
        data += os.read(follower.stdout.fileno(), 4096)
    assert follower.poll() is None
    (node.project / "gate").touch()
    data += follower.communicate(timeout=HANG_GUARD)[0]
    found = Followed(data)
    assert (found.ended, found.logs, found.state["state"]) == (True, {0: b"done\n"}, "succeeded")
    assert found.states[0]["state"] == "running"


def test_a_job_goes_on_when_its_follower_goes_away(node: Node) -> None:
    node.start("import os, time\nwhile not os.path.exists('gate'): print('x' * 1000, flush=True)\n")
    follower = node.popen("follow", "--job", node.id(), "--wait")
    assert follower.stdout is not None
    os.read(follower.stdout.fileno(), 1)
    follower.stdout.close()
    assert follower.wait(HANG_GUARD) == 0
    assert follower.stderr is not None
    assert follower.stderr.read() == b""
    follower.stderr.close()
    assert node.state()["state"] == "running"
    (node.project / "gate").touch()
    assert (
        node.follow(offsets={0: (node.folder() / "ranks" / "0.log").stat().st_size}).state["state"]
        == "succeeded"
    )


def test_a_job_that_the_node_does_not_know_cannot_be_followed(node: Node) -> None:
    done = node.call("follow", "--job=nothing", "--wait")
    assert done.returncode != 0
    assert b"no job nothing" in done.stderr


# -- how a job ends --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "state", "exit_code", "number"),
    [
        ("pass", "succeeded", 0, None),
        ("raise SystemExit(7)", "failed", 7, None),
        ("raise ValueError", "failed", 1, None),
        ("import os; os.kill(os.getpid(), 9)", "failed", 137, 9),
        ("import os; os.kill(os.getpid(), 15)", "failed", 143, 15),
        ("import os; os.abort()", "failed", 134, 6),
    ],
)
def test_the_exit_code_is_that_of_the_rank(
    node: Node, code: str, state: str, exit_code: int, number: int | None
) -> None:
    node.start(code)
    found = node.follow().state
    assert (found["state"], found["exit_code"]) == (state, exit_code)
    (record,) = found["ranks"]
    assert (record["rank"], record["exit_code"], record["signal"]) == (0, exit_code, number)
    assert found["started"] <= record["started"] <= record["ended"] <= found["ended"]


def test_the_first_rank_that_failed_gives_the_exit_code_and_the_others_are_stopped(node: Node) -> None:
    stubborn = (
        "import signal, sys, time\nsignal.signal(signal.SIGTERM, lambda *_: sys.exit(3))\n"
        "open('ready', 'w').close()\n" + FOREVER
    )
    failing = "import os, time\nwhile not os.path.exists('ready'): time.sleep(0.02)\nraise SystemExit(7)\n"
    node.start(stubborn, failing, FOREVER)
    found = node.follow().state
    assert (found["state"], found["exit_code"]) == ("failed", 7)
    ends = {record["rank"]: record for record in found["ranks"]}
    assert {rank: record["exit_code"] for rank, record in ends.items()} == {0: 3, 1: 7, 2: 143}
    assert min(ends, key=lambda rank: float(ends[rank]["ended"])) == 1
    assert not any(alive(record["pid"]) for record in ends.values())


def test_a_rank_that_cannot_be_started_says_so_in_its_log(node: Node) -> None:
    node.start(processes=[{"argv": ["@RANK@", "no-such-program"], "env": {"RANK": "0"}}])
    found = node.follow()
    assert found.state["exit_code"] == 127
    assert b"no-such-program" in found.logs[0]


def test_a_launcher_that_is_missing_is_named_in_the_state(node: Node) -> None:
    node.start(processes=[{"argv": ["/no/such/python", "-m", "x", "@RANK@"], "env": {}}])
    found = node.follow().state
    assert (found["state"], found["exit_code"]) == ("failed", 127)
    assert "/no/such/python" in found["error"]


def test_a_launcher_that_fails_after_all_its_ranks_finished_fails_nothing(node: Node) -> None:
    argv = ["sh", "-c", '"$@"; exit 1', "sh", "@RANK@", "true"]
    node.start(processes=[{"argv": argv, "env": {"RANK": "0"}}])
    assert node.follow().state["state"] == "succeeded"


def test_a_launcher_that_ends_well_without_its_ranks_is_a_failure(node: Node) -> None:
    argv = ["sh", "-c", '"$@"', "sh", "@RANK@", "true"]
    node.start(processes=[{"argv": argv, "env": {"RANK": "0"}}], ranks=2)
    found = node.follow().state
    assert (found["state"], found["exit_code"]) == ("failed", 1)


def test_a_launcher_that_is_killed_leaves_its_signal_as_the_code(node: Node) -> None:
    node.start(processes=[{"argv": ["sh", "-c", "kill -9 $$"], "env": {}}], ranks=1)
    found = node.follow().state
    assert (found["state"], found["exit_code"]) == ("failed", 137)


def test_words_of_the_script_arrive_untouched(node: Node) -> None:
    words = ["--", "-x", "--job", "other", "--", "", "a b", "$(id)", "@RANK", "\u00e9"]
    name = node.script("import sys, json; print(json.dumps(sys.argv[1:]))")
    node.start(processes=[{"argv": ["@RANK@", sys.executable, name, *words], "env": {"RANK": "0"}}])
    assert json.loads(node.follow().logs[0]) == words


def test_ranks_run_in_the_project_with_their_environment_and_no_input(node: Node) -> None:
    code = (
        "import os, sys\nprint(os.getcwd(), os.environ['MINE'], os.environ['RANK'], repr(sys.stdin.read()))"
    )
    node.start(code, code, env={"MINE": "a b'\"$x"})
    found = node.follow()
    for rank in (0, 1):
        assert found.logs[rank].decode().strip() == f"{node.project} a b'\"$x {rank} ''"


# -- stopping --------------------------------------------------------------------------------------------------


def test_cancelling_ends_the_ranks_and_is_remembered(node: Node) -> None:
    node.start(FOREVER, FOREVER)
    pids = [node.rank_pid(0), node.rank_pid(1)]
    answer = node.kill("job-1", "--cancel")
    assert (answer["known"], answer["left"], answer["state"]) == (True, 0, "cancelled")
    assert answer["ended"] >= 2
    assert not any(map(alive, pids))
    found = node.follow().state
    assert (found["state"], found["exit_code"]) == ("cancelled", 130)


def test_stopping_without_a_cancel_is_a_failure_with_the_signals_code(node: Node) -> None:
    node.start(FOREVER)
    node.rank_pid()
    assert node.kill()["state"] == "failed"
    assert node.state()["exit_code"] == 143


def test_sigterm_reaches_a_rank_once_and_its_workers_not_at_all(node: Node) -> None:
    worker = node.script(
        "import signal, time\nsignal.signal(signal.SIGTERM, lambda *_: open('worker-told', 'w').close())\n"
        "open('worker-ready', 'w').close()\nwhile True: time.sleep(0.02)\n"
    )
    node.start(
        "import os, signal, subprocess, sys, time\n"
        "told = []\n"
        "signal.signal(signal.SIGTERM, lambda *_: told.append(1))\n"
        f"worker = subprocess.Popen([sys.executable, {worker!r}])\n"
        "while not os.path.exists('worker-ready'): time.sleep(0.02)\n"
        "print('ready', flush=True)\n"
        "while not told: time.sleep(0.02)\n"
        "time.sleep(0.7)  # a second signal would come within 0.1 s\n"
        "print('told', len(told), 'worker', os.path.exists('worker-told'), flush=True)\n"
        "worker.kill()\n"
        "raise SystemExit(0)\n"
    )
    log = node.folder() / "ranks" / "0.log"
    until(lambda: log.exists() and b"ready" in log.read_bytes())
    assert node.kill()["left"] == 0
    assert log.read_bytes() == b"ready\ntold 1 worker False\n"


def test_a_rank_that_will_not_stop_is_killed_after_the_grace(node: Node) -> None:
    node.start(
        "import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nprint('deaf', flush=True)\n" + FOREVER
    )
    log = node.folder() / "ranks" / "0.log"
    until(lambda: log.exists() and log.read_bytes())
    assert node.kill(grace=0.3)["left"] == 0
    assert node.state()["ranks"][0]["exit_code"] == 137


DAEMON = (
    "import os, signal, time\n"
    "if os.fork() == 0:\n"
    "    os.setsid()\n"
    "    if os.fork(): os._exit(0)\n"
    "    signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    "    with open('daemon.tmp', 'w') as f: f.write(str(os.getpid()))\n"
    "    os.rename('daemon.tmp', 'daemon')\n"
    "    while True: time.sleep(0.05)\n"
    "while not os.path.exists('daemon'): time.sleep(0.02)\n"
)


def test_processes_that_hid_from_their_rank_end_with_the_job(node: Node) -> None:
    node.start(DAEMON, grace=0.2)
    assert node.follow().state["state"] == "succeeded"
    assert not alive(int((node.project / "daemon").read_text()))


def test_processes_that_hid_from_their_rank_are_found_when_it_is_stopped(node: Node) -> None:
    node.start(DAEMON + FOREVER)
    pid = int(until(lambda: (node.project / "daemon").exists() and (node.project / "daemon").read_text()))
    answer = node.kill("job-1", "--cancel", grace=0.3)
    assert (answer["left"], answer["state"]) == (0, "cancelled")
    assert not alive(pid)


def test_a_wrapper_that_is_killed_takes_its_rank_along(node: Node) -> None:
    node.start(FOREVER, grace=1.0)
    pid = node.rank_pid()
    wrapper = int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])
    os.kill(wrapper, signal.SIGKILL)
    assert node.follow().state["state"] == "failed"
    assert not alive(pid)


def test_a_job_whose_supervisor_was_killed_is_lost_and_can_still_be_ended(node: Node) -> None:
    supervisor = node.start(FOREVER)
    pid = node.rank_pid()
    os.kill(supervisor, signal.SIGKILL)
    until(lambda: not alive(supervisor))
    assert node.state()["state"] == "lost"
    assert alive(pid)
    assert node.follow().ended
    answer = node.kill("job-1", "--cancel")
    assert (answer["left"], answer["state"]) == (0, "failed")
    assert node.state()["exit_code"] == 143
    assert not alive(pid)


def test_jobs_side_by_side_do_not_end_each_other(node: Node) -> None:
    node.start(FOREVER, job="job-1")
    node.start(FOREVER, job="job-10")
    node.start("import os, time\nwhile not os.path.exists('gate'): time.sleep(0.02)\n", job="job-2")
    pids = {job: node.rank_pid(job=job) for job in ("job-1", "job-10", "job-2")}
    node.kill("job-1", "--cancel")
    assert [alive(pids[job]) for job in ("job-1", "job-10", "job-2")] == [False, True, True]
    (node.project / "gate").touch()
    assert node.follow("job-2").state["state"] == "succeeded"
    assert alive(pids["job-10"])
    assert {one["job"]: one["state"] for one in node.answer("jobs")} == {
        node.id("job-1"): "cancelled",
        node.id("job-10"): "running",
        node.id("job-2"): "succeeded",
    }


def test_stopping_a_job_that_has_ended_changes_nothing(node: Node) -> None:
    node.start("pass")
    before = node.follow().state
    assert node.kill("job-1", "--cancel") == {"known": True, "ended": 0, "left": 0, "state": "succeeded"}
    assert node.follow().state == before


def test_stopping_a_job_that_the_node_does_not_know_is_no_error(node: Node) -> None:
    assert node.kill("never-seen") == {"known": False, "ended": 0, "left": 0}


def test_a_launcher_that_lingers_after_its_ranks_can_be_ended_and_the_job_has_succeeded(node: Node) -> None:
    argv = ["sh", "-c", '"$@"; sleep 1000', "sh", "@RANK@", "true"]
    node.start(processes=[{"argv": argv, "env": {"RANK": "0"}}])
    record = node.folder() / "ranks" / "0.json"
    until(lambda: record.exists() and json.loads(record.read_text())["exit_code"] == 0)
    assert node.state()["state"] == "running"
    assert node.kill("job-1", "--finished")["state"] == "succeeded"


def test_a_job_id_is_used_once(node: Node) -> None:
    node.start("pass")
    node.follow()
    with pytest.raises(AssertionError, match="FileExistsError"):
        node.start("pass")


@pytest.mark.parametrize("job", ["../x", "a/b", "", "a b", "job\n"])
def test_a_job_id_that_is_not_one_plain_word_is_refused(node: Node, job: str) -> None:
    done = node.call("kill", "--job", job)
    assert done.returncode != 0
    assert b"not a job id" in done.stderr


# -- secrets ---------------------------------------------------------------------------------------------------


def test_variables_of_a_job_reach_its_ranks_and_nobody_elses_eyes(node: Node) -> None:
    node.start(
        "import os\nprint(os.environ['TOKEN'], flush=True)\n" + FOREVER, env={"TOKEN": "hunter2-of-this-test"}
    )
    log = node.folder() / "ranks" / "0.log"
    until(lambda: log.exists() and log.read_bytes() == b"hunter2-of-this-test\n")
    shown = []
    for entry in Path("/proc").iterdir():
        try:
            shown.append((entry / "cmdline").read_bytes())
        except OSError:
            continue
    assert any(str(AGENT).encode() in line and b"supervise" in line for line in shown)
    assert not any(b"hunter2-of-this-test" in line for line in shown)
    assert stat.S_IMODE(node.folder().stat().st_mode) == 0o700
    assert not (node.folder() / "job.json").stat().st_mode & 0o022


# -- set-up ----------------------------------------------------------------------------------------------------


def set_up(
    node: Node, *commands: str, inputs: tuple[str, ...] = (), env: dict[str, str] | None = None
) -> Any:
    wanted = {"commands": commands, "inputs": inputs, "env": env or {}}
    return node.answer("setup", "--project=p", stdin=wanted)


def test_set_up_runs_once_for_the_same_content_and_again_for_another(node: Node) -> None:
    node.answer("probe", "--project=p", "--private-ip=127.0.0.1")
    (node.project / "requirements.txt").write_text("a")
    commands = ("echo run >> log", 'echo "$MINE" >> log')

    def ran() -> bool:
        return bool(set_up(node, *commands, inputs=("requirements.txt",), env={"MINE": "x y"})["ran"])

    assert [ran(), ran(), ran()] == [True, False, False]
    assert (node.project / "log").read_text() == "run\nx y\n"
    (node.project / "requirements.txt").write_text("b")
    assert [ran(), ran()] == [True, False]
    assert set_up(node, "true")["ran"] is True


def test_moving_content_from_one_input_to_another_is_a_change(node: Node) -> None:
    node.answer("probe", "--project=p", "--private-ip=127.0.0.1")
    for a, b in (("xy", "z"), ("x", "yz")):
        (node.project / "a").write_text(a)
        (node.project / "b").write_text(b)
        assert set_up(node, "true", inputs=("a", "b"))["ran"] is True


def test_a_set_up_command_that_fails_stops_the_rest_shows_its_output_and_runs_again(node: Node) -> None:
    node.answer("probe", "--project=p", "--private-ip=127.0.0.1")
    for _ in range(2):
        answer = set_up(node, "echo fine", "echo out; echo err >&2; exit 3", "touch never")
        assert answer == {
            "ran": True,
            "exit_code": 3,
            "command": "echo out; echo err >&2; exit 3",
            "output": "out\nerr\n",
        }
    assert not (node.project / "never").exists()


def test_reading_the_inputs_of_a_set_up_changes_nothing_in_the_project(node: Node) -> None:
    node.answer("probe", "--project=p", "--private-ip=127.0.0.1")
    (node.project / "real").mkdir()
    (node.project / "real" / "base.txt").write_text("a")
    (node.project / "link").symlink_to("real")
    assert set_up(node, "cat link/base.txt", inputs=("link/base.txt",))["exit_code"] == 0
    assert (node.project / "link").is_symlink()


# -- the machine -----------------------------------------------------------------------------------------------


def loaded() -> Any:
    described = importlib.util.spec_from_file_location("node_agent", AGENT)
    assert described is not None
    assert described.loader is not None
    module = importlib.util.module_from_spec(described)
    described.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("address", "name"),
    [("127.0.0.1", "lo"), ("127.77.0.4", "lo"), ("192.0.2.1", ""), ("255.255.255.255", "")],
)
def test_the_interface_is_the_one_that_carries_the_address(address: str, name: str) -> None:
    assert loaded().interface_of(address) == name


def test_a_probe_says_what_a_job_must_know(node: Node) -> None:
    found = node.answer("probe", "--project=p", "--private-ip=127.0.0.1")
    assert found["interface"] == "lo"
    assert found["cpus"] == len(os.sched_getaffinity(0))
    assert 1024 <= found["free_port"] < 65536
    assert os.access(found["python"], os.X_OK)
    assert found["disk_free"] > 0
    assert found["running"] == []
    assert stat.S_IMODE((node.home / ".cloudddp").stat().st_mode) == 0o700
    node.start(FOREVER)
    assert node.answer("probe", "--project=p", "--private-ip=127.0.0.1")["running"] == [node.id()]


@pytest.mark.parametrize("wanted", ["no-such-python", "/no/such/python"])
def test_a_python_that_is_not_there_is_reported_as_none(node: Node, wanted: str) -> None:
    found = node.answer("probe", "--project=p", "--private-ip=127.0.0.1", "--python", wanted)
    assert found["python"] == ""


def test_a_python_that_was_named_is_the_one_reported(node: Node) -> None:
    found = node.answer("probe", "--project=p", "--private-ip=127.0.0.1", "--python", sys.executable)
    assert found["python"] == sys.executable


def test_packing_gives_the_files_that_exist_and_skips_those_that_do_not(node: Node) -> None:
    (node.project / "runs" / "1").mkdir(parents=True)
    (node.project / "runs" / "1" / "m.pt").write_bytes(b"\x00weights")
    (node.project / "runs" / "latest").symlink_to("1")
    done = node.call("pack", "--project=p", "runs", "absent")
    assert done.returncode == 0
    with tarfile.open(fileobj=io.BytesIO(done.stdout)) as archive:
        assert sorted(archive.getnames()) == ["runs", "runs/1", "runs/1/m.pt", "runs/latest"]
        member = archive.extractfile("runs/1/m.pt")
        assert member is not None
        assert member.read() == b"\x00weights"


# -- the oldest Python -----------------------------------------------------------------------------------------


def oldest_python() -> str:
    """A Python 3.9 that runs, or ''; a version manager may put a name on PATH that does not."""
    found = shutil.which("python3.9") or ""
    if not found:
        return ""
    done = subprocess.run(
        [found, "-c", "import sys; print(sys.version_info[:2])"], capture_output=True, check=False
    )
    return found if done.stdout.strip() == b"(3, 9)" else ""


@pytest.mark.skipif(not oldest_python(), reason="no Python 3.9 on PATH")
def test_the_agent_does_its_work_on_python_3_9(tmp_path: Path) -> None:
    node = Node(tmp_path / "home", python=oldest_python())
    assert node.answer("probe", "--project=p", "--private-ip=127.0.0.1")["interface"] == "lo"
    assert set_up(node, "touch made")["ran"] is True
    node.start("print('hello')", "raise SystemExit(7)")
    found = node.follow()
    assert (found.state["state"], found.state["exit_code"]) == ("failed", 7)
    assert b"hello\n" in (found.logs.get(0, b"hello\n"))
    node.start(FOREVER, job="job-2")
    node.rank_pid(job="job-2")
    assert node.kill("job-2", "--cancel")["state"] == "cancelled"
    assert node.call("pack", "--project=p", "made").returncode == 0
    assert processes_of(node.home) == []
