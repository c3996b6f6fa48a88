"""The logs of ranks on a node: their limit, their times, and where a client begins to read."""

from __future__ import annotations

import contextlib
import itertools
import os
import select
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.agentnode import FOREVER, HANG_GUARD, Followed, Node, Refused, alive, until
from support.gangs import parent_of

from agent.ranks import rank_log
from agent.ranks.rank_log import NOTE
from cloudddp.agent.protocol import LAUNCHER_RANK, ExitCode
from cloudddp.agent.protocol.frames import Frame, Heartbeat, Log, encode_frame
from cloudddp.agent.protocol.jobs import JobState
from cloudddp.agent.protocol.phases import JobPhase
from cloudddp.agent.protocol.start import Process
from cloudddp.agent.replies import FrameDecoder

MIB = 1 << 20
LINE = 32  # bytes


def lines_of(count: int) -> str:
    """A script that writes numbered lines of LINE bytes as fast as it can."""
    write = f"os.write(1, b''.join(b'%0{LINE - 1}d\\n' % n for n in range(k, k + 1000)))"
    return f"import os\nfor k in range(0, {count}, 1000):\n    {write}\n"


def numbers(data: bytes) -> list[int]:
    assert len(data) % LINE == 0
    return [int(data[at : at + LINE]) for at in range(0, len(data), LINE)]


def note_of(begin: int, end: int) -> bytes:
    """The note at the end of a hole, which itself takes the place of some bytes."""
    return NOTE % (end - begin + len(NOTE % (end - begin)))


def numbers_after_note(data: bytes, begin: int, end: int) -> list[int]:
    """The lines that begin after the note, which is at `end`, where a hole ends. `data` begins there."""
    note = note_of(begin, end)
    assert data.startswith(note)
    return numbers(data[len(note) + -(end + len(note)) % LINE :])


def disk_usage(path: Path) -> int:
    return path.stat().st_blocks * 512


def test_long_log_keeps_its_beginning_and_its_end(node: Node) -> None:
    count = 400_000
    node.start(lines_of(count), log_mb=2)
    assert node.follow().state.phase is JobPhase.SUCCEEDED
    path = node.folder() / "ranks" / "0.log"
    assert path.stat().st_size == count * LINE
    until(lambda: disk_usage(path) <= 2 * MIB)
    found = node.follow()
    ((begin, end),) = found.dropped[0]
    first = -(-(end + len(note_of(begin, end))) // LINE)
    assert numbers(found.logs[0][:begin]) == [*range(begin // LINE)]
    assert numbers_after_note(found.logs[0][begin:], begin, end) == [*range(first, count)]
    assert len(found.logs[0]) <= 2 * MIB
    assert begin >= MIB // 2
    assert count * LINE - end >= MIB
    short, long = node.follow(tail=100), node.follow(tail=count - 1000)
    assert (short.dropped, len(short.logs[0])) == ({}, 100 * LINE)
    assert (long.starts[0], numbers_after_note(long.logs[0], begin, end)[0]) == (end, first)


def wrapper_of(node: Node) -> int:
    return parent_of(node.rank_pid())


def test_client_that_reads_in_time_gets_everything_of_a_log_that_is_cut(node: Node) -> None:
    """The wrapper, which cuts the log, is stopped until the client has read what was written."""
    rounds, count = 3, 100_000
    code = (
        "import os, time\n"
        f"for k in range({rounds}):\n"
        "    while not os.path.exists(f'go{k}'): time.sleep(0.02)\n"
        f"    os.write(1, b''.join(b'%0{LINE - 1}d\\n' % n for n in range(k * {count}, (k + 1) * {count})))\n"
    )
    node.start(code + FOREVER, log_mb=1)
    wrapper, log = wrapper_of(node), node.folder() / "ranks" / "0.log"
    data, offsets = b"", dict[int, int]()
    for k in range(rounds):
        os.kill(wrapper, signal.SIGSTOP)
        try:
            (node.project / f"go{k}").touch()
            while len(data) < (k + 1) * count * LINE:
                found = node.follow(wait=False, offsets=offsets)
                assert found.dropped == {}
                data += found.logs.get(0, b"")
                offsets = {**offsets, **found.offsets}
        finally:
            os.kill(wrapper, signal.SIGCONT)
        until(lambda: disk_usage(log) <= MIB)
    assert numbers(data) == list(range(rounds * count))


def test_nothing_that_a_rank_wrote_is_lost_with_its_wrapper(node: Node) -> None:
    node.start("import os\nos.write(1, b'before\\n')\n" + FOREVER)
    rank = node.rank_pid()
    until(lambda: node.follow(wait=False).logs.get(0) == b"before\n")
    os.kill(wrapper_of(node), signal.SIGKILL)
    until(lambda: not alive(rank))
    found = node.follow()
    assert (found.logs[0], found.state.ranks[0].signal) == (b"before\n", signal.SIGKILL)


def test_tail_begins_at_a_line(node: Node) -> None:
    code = "import sys\nsys.stdout.write('\\n'.join(map(str, range(100_000))) + {!r})\n"
    node.start(code.format(""), code.format("\n"))
    node.follow()
    for tail, shown in ((0, []), (1, [99_999]), (3, [99_997, 99_998, 99_999])):
        found = node.follow(tail=tail)
        assert [[int(word) for word in found.logs[rank].split()] for rank in (0, 1)] == [shown, shown]
    whole = node.follow(tail=1 << 20)
    assert (whole.starts[0], len(whole.logs[0].split())) == (0, 100_000)


def test_since_begins_where_the_rank_was_at_that_time(node: Node) -> None:
    """`since` is counted from when the node gets the request, which has two seconds here."""
    code = (
        "import os, time\nprint('old 1\\nold 2', flush=True)\n"
        "while not os.path.exists('gate'): time.sleep(0.02)\nprint('new 1\\nnew 2')\n"
    )
    node.start(code)
    times = node.folder() / "ranks" / "0.times"
    until(lambda: times.exists() and times.read_bytes()[-8:] == (12).to_bytes(8, "little"))
    between = time.time()
    time.sleep(2)
    (node.project / "gate").touch()
    node.follow()
    found = node.follow(since=time.time() - between)
    assert found.logs[0] == b"new 1\nnew 2\n"
    assert node.follow(since=0.0).logs[0] == b""
    assert node.follow(since=1e6).logs[0] == b"old 1\nold 2\nnew 1\nnew 2\n"


def test_since_begins_within_a_line_that_is_very_long(tmp_path: Path) -> None:
    """As that of a progress bar, whose states end with carriage returns."""
    log = tmp_path / "0.log"
    log.write_bytes(b"\n" + b"x" * 200_000)
    log.with_suffix(".times").write_bytes(struct.pack("dQ", time.time() - 100.0, 150_000))
    assert rank_log.start_of(log, 50.0, None) == 150_000


def test_only_the_logs_of_the_requested_ranks_are_sent_and_a_damaged_index_does_no_harm(node: Node) -> None:
    """A rank can write to this file, or put a pipe there, which would block."""
    node.start("print('all')", "print('one')", "print('two')")
    node.follow()
    assert node.follow(ranks=(0, 2)).logs == {0: b"all\n", 2: b"two\n"}
    path = node.folder() / "ranks" / "0.times"
    for content in (b"", b"\x00" * 15, b"\xff" * 4096, None):
        path.unlink(missing_ok=True)
        if content is None:
            os.mkfifo(path)
        else:
            path.write_bytes(content)
        found = node.follow(since=3600.0)
        assert (found.ended, found.logs[0] in (b"all\n", b"")) == (True, True)
        assert node.follow().logs[0] == b"all\n"


def test_note_of_a_restart_keeps_the_last_state_of_a_progress_bar(node: Node) -> None:
    """A line that ends with a carriage return is overwritten by what follows it."""
    node.start("import sys\nprint('10%\\r50%', end='\\r', flush=True)\nsys.exit(3)", retries=1)
    followed = node.follow()
    assert followed.state.phase is JobPhase.FAILED
    assert b"50%\r\n--- cloudddp: restart 1" in followed.logs[0]


# -- following: all output, continued after a broken connection ----------------------------------------------


WAIT_FOR_GATE = "while not os.path.exists('gate'): time.sleep(0.02)\n"


def test_output_of_ranks_and_launcher_arrives_byte_for_byte(node: Node) -> None:
    launcher = ("sh", "-c", 'echo launching; "$@"', "sh")
    code = "import os\nos.write(2, b'err\\xff\\x00\\r\\n')\nos.write(1, b'out\\n')\n"
    node.start(processes=[Process(launcher, (sys.executable, node.script(code)), {"RANK": "3"})])
    assert node.follow().logs == {LAUNCHER_RANK: b"launching\n", 3: b"err\xff\x00\r\nout\n"}


def test_following_continues_at_the_given_offsets(node: Node) -> None:
    node.start(
        "import os, time\nprint('one\\ntwo', flush=True)\nos.write(1, b'par')\n"
        + WAIT_FOR_GATE
        + "print('tial\\nlast')\n"
    )
    until((node.folder() / "ranks" / "0.log").exists)
    first = until(lambda: (found := node.follow(wait=False)).logs.get(0, b"")[-3:] == b"par" and found)
    assert (first.logs, first.ended, first.state.phase) == ({0: b"one\ntwo\npar"}, True, JobPhase.RUNNING)
    (node.project / "gate").touch()
    second = node.follow(offsets=first.offsets)
    assert second.logs == {0: b"tial\nlast\n"}
    third = node.follow(offsets={**first.offsets, **second.offsets})
    assert (third.logs, third.state.phase) == ({}, JobPhase.SUCCEEDED)


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


@contextlib.contextmanager
def endless(node: Node) -> Iterator[Iterator[Frame]]:
    """Have the log of rank 0 contain 1 TiB (it is sparse), as if it wrote faster than any network takes it;
    yield the frames of a follower."""
    log = node.folder() / "ranks" / "0.log"
    until(log.exists)
    os.truncate(log, 1 << 40)
    follower = node.begin(node.following())
    try:
        yield frames_of(follower)
    finally:
        follower.kill()
        follower.communicate(timeout=HANG_GUARD)


def test_endless_log_hides_neither_the_state_nor_the_other_logs(node: Node) -> None:
    failing = f"import os, time\n{WAIT_FOR_GATE}print('boom', flush=True)\nraise SystemExit(7)\n"
    node.start(STUBBORN, failing, grace=HANG_GUARD)
    failed, shown = False, b""
    with endless(node) as frames:
        for frame in frames:
            (node.project / "gate").touch()
            failed |= isinstance(frame, JobState) and any(one.exit_code == 7 for one in frame.ranks)
            shown += frame.data if isinstance(frame, Log) and frame.rank == 1 else b""
            if failed and shown:
                break
    assert (failed, shown) == (True, b"boom\n")


def test_end_of_a_job_is_reported_before_the_rest_of_its_logs(node: Node) -> None:
    """Other nodes are stopped when it is reported."""
    node.start("raise SystemExit(7)\n")
    until(lambda: node.state().phase is JobPhase.FAILED)
    with endless(node) as frames:
        first = itertools.islice(frames, 16)
        assert any(isinstance(one, JobState) and one.phase is JobPhase.FAILED for one in first)


def test_running_job_is_followed_to_its_end_with_heartbeats(node: Node) -> None:
    """A partial line is sent once."""
    node.start(
        "import os, time\nos.write(1, b'whole\\nhalf')\n" + WAIT_FOR_GATE + "os.write(1, b' and half\\n')\n"
    )
    follower = node.begin(node.following(heartbeat=0.15))
    assert follower.stdout is not None
    data = b""
    while b"half" not in data or data.count(encode_frame(Heartbeat())) < 3:
        data += os.read(follower.stdout.fileno(), 4096)
    assert follower.poll() is None
    (node.project / "gate").touch()
    data += follower.communicate(timeout=HANG_GUARD)[0]
    found = Followed(data)
    assert (found.ended, found.logs) == (True, {0: b"whole\nhalf and half\n"})
    assert (found.states[0].phase, found.state.phase) == (JobPhase.RUNNING, JobPhase.SUCCEEDED)
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
