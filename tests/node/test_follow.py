"""Following a job on a node, in real processes: its output in full, continued after a broken connection."""

from __future__ import annotations

import itertools
import os
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.agentnode import FOREVER, HANG_GUARD, Followed, Node, Refused, until

from cloudddp.agent.protocol import LAUNCHER_RANK, ExitCode
from cloudddp.agent.protocol.frames import Frame, Log
from cloudddp.agent.protocol.jobs import JobState
from cloudddp.agent.protocol.phases import JobPhase
from cloudddp.agent.protocol.start import Process
from cloudddp.agent.steps import FrameDecoder

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the agent needs /proc")

WAIT_FOR_GATE = "while not os.path.exists('gate'): time.sleep(0.02)\n"


def test_every_line_of_a_fast_rank_arrives(node: Node) -> None:
    code = "import os\nos.write(1, b''.join(b'line %06d\\n' % k for k in range(200_000)) + b'no newline')\n"
    piped = "import sys\nsys.stdout.write('\\n'.join(f'line {k:06d}' for k in range(200_000)))\n"
    node.start(code, piped)
    found = node.follow()
    lines = [b"line %06d" % k for k in range(200_000)]
    assert found.logs[0].split(b"\n") == [*lines, b"no newline"]
    assert found.logs[1].split(b"\n") == lines
    assert found.ended
    assert found.state.phase is JobPhase.SUCCEEDED


def test_stdout_and_stderr_arrive_byte_for_byte(node: Node) -> None:
    node.start("import os\nos.write(2, b'err\\xff\\x00\\r\\n')\nos.write(1, b'out\\n')\n")
    assert node.follow().logs[0] == b"err\xff\x00\r\nout\n"


def test_launcher_output_has_its_own_rank_number(node: Node) -> None:
    launcher = ("sh", "-c", 'echo launching; "$@"', "sh")
    rank = (sys.executable, node.script("print('rank')"))
    node.start(processes=[Process(launcher, rank, {"RANK": "3"})])
    assert node.follow().logs == {LAUNCHER_RANK: b"launching\n", 3: b"rank\n"}


def test_following_continues_at_the_given_offsets(node: Node) -> None:
    node.start(
        "import os, time\nprint('one\\ntwo', flush=True)\nos.write(1, b'par')\n"
        + WAIT_FOR_GATE
        + "print('tial\\nlast')\n"
    )
    until(
        lambda: (
            (node.folder() / "ranks" / "0.log").exists()
            and node.follow(wait=False).logs.get(0, b"")[-3:] == b"par"
        )
    )
    first = node.follow(wait=False)
    assert first.logs == {0: b"one\ntwo\npar"}
    assert first.ended
    assert first.state.phase is JobPhase.RUNNING
    (node.project / "gate").touch()
    second = node.follow(offsets=first.offsets)
    assert second.logs == {0: b"tial\nlast\n"}
    third = node.follow(offsets={**first.offsets, **second.offsets})
    assert third.logs == {}
    assert third.state.phase is JobPhase.SUCCEEDED


STUBBORN = "import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + FOREVER


def frames_of(follower: subprocess.Popen[bytes]) -> Iterator[Frame]:
    """Yield the frames that a follower writes, until it ends or for HANG_GUARD seconds."""
    decoder = FrameDecoder()
    assert follower.stdout is not None
    end = time.monotonic() + HANG_GUARD
    while select.select([follower.stdout], [], [], max(0.0, end - time.monotonic()))[0]:
        if not (data := os.read(follower.stdout.fileno(), 1 << 16)):
            return
        yield from decoder.feed(data)
        if time.monotonic() > end:
            return


def make_endless(log: Path) -> None:
    """Have a log contain 1 TiB (it is sparse): as if its rank wrote faster than any network takes it."""
    until(log.exists)
    os.truncate(log, 1 << 40)


def test_endless_log_hides_neither_the_state_nor_the_other_logs(node: Node) -> None:
    failing = f"import os, time\n{WAIT_FOR_GATE}print('boom', flush=True)\nraise SystemExit(7)\n"
    node.start(STUBBORN, failing, grace=HANG_GUARD)
    make_endless(node.folder() / "ranks" / "0.log")
    follower = node.begin(node.following())
    failed, shown = False, b""
    try:
        for frame in frames_of(follower):
            (node.project / "gate").touch()
            failed = failed or (
                isinstance(frame, JobState) and any(one.exit_code == 7 for one in frame.ranks)
            )
            shown += frame.data if isinstance(frame, Log) and frame.rank == 1 else b""
            if failed and shown:
                break
        assert (failed, shown) == (True, b"boom\n")
    finally:
        follower.kill()
        follower.communicate(timeout=HANG_GUARD)


def test_end_of_a_job_is_reported_before_the_rest_of_its_logs(node: Node) -> None:
    """Other nodes are stopped when it is reported."""
    node.start("raise SystemExit(7)\n")
    until(lambda: node.state().phase is JobPhase.FAILED)
    make_endless(node.folder() / "ranks" / "0.log")
    follower = node.begin(node.following())
    try:
        first = itertools.islice(frames_of(follower), 16)
        assert any(isinstance(one, JobState) and one.phase is JobPhase.FAILED for one in first)
    finally:
        follower.kill()
        follower.communicate(timeout=HANG_GUARD)


def test_following_continues_after_a_broken_connection(node: Node) -> None:
    code = "import time\nfor k in range(3000):\n print(k, flush=True)\n if k % 100 == 0: time.sleep(0.02)\n"
    node.start(code)
    follower = node.begin(node.following())
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


def test_partial_line_is_sent_once(node: Node) -> None:
    node.start(
        "import os, time\nos.write(1, b'whole\\nhalf')\n" + WAIT_FOR_GATE + "os.write(1, b' and half\\n')\n"
    )
    log = node.folder() / "ranks" / "0.log"
    until(lambda: log.exists() and log.read_bytes().endswith(b"half"))
    follower = node.begin(node.following())
    assert follower.stdout is not None
    data = b""
    while b"half" not in data:
        data += os.read(follower.stdout.fileno(), 4096)
    (node.project / "gate").touch()
    data += follower.communicate(timeout=HANG_GUARD)[0]
    assert Followed(data).logs == {0: b"whole\nhalf and half\n"}


def test_running_job_is_followed_to_its_end(node: Node) -> None:
    node.start("import os, time\n" + WAIT_FOR_GATE + "print('done')\n")
    follower = node.begin(node.following())
    assert follower.stdout is not None
    data = b""
    while b"state " not in data:
        data += os.read(follower.stdout.fileno(), 4096)
    assert follower.poll() is None
    (node.project / "gate").touch()
    data += follower.communicate(timeout=HANG_GUARD)[0]
    found = Followed(data)
    assert (found.ended, found.logs, found.state.phase) == (True, {0: b"done\n"}, JobPhase.SUCCEEDED)
    assert found.states[0].phase is JobPhase.RUNNING


def test_heartbeats_come_at_the_requested_interval(node: Node) -> None:
    node.start("import os, time\n" + WAIT_FOR_GATE)
    follower = node.begin(node.following(heartbeat=0.15))
    assert follower.stdout is not None
    data = b""
    while data.count(b"heartbeat\n") < 3:
        data += os.read(follower.stdout.fileno(), 4096)
    (node.project / "gate").touch()
    data += follower.communicate(timeout=HANG_GUARD)[0]
    found = Followed(data)
    assert found.heartbeats >= 3
    assert found.ended
    assert node.follow().heartbeats == 0


def test_job_continues_when_its_follower_disconnects(node: Node) -> None:
    node.start("import os, time\nwhile not os.path.exists('gate'): print('x' * 1000, flush=True)\n")
    follower = node.begin(node.following())
    assert follower.stdout is not None
    os.read(follower.stdout.fileno(), 1)
    follower.stdout.close()
    assert follower.wait(HANG_GUARD) == 0
    assert follower.stderr is not None
    assert follower.stderr.read() == b""
    follower.stderr.close()
    assert node.state().phase is JobPhase.RUNNING
    (node.project / "gate").touch()
    size = (node.folder() / "ranks" / "0.log").stat().st_size
    assert node.follow(offsets={0: size}).state.phase is JobPhase.SUCCEEDED


def test_unknown_job_cannot_be_followed(node: Node) -> None:
    with pytest.raises(Refused, match=r"no job .+ on this node") as refused:
        node.follow()
    assert refused.value.exit_code == ExitCode.NO_JOB
