"""A job on a node, in real processes: its output in full, and how it ends."""

from __future__ import annotations

import json
import os
import sys

import pytest
from agentnode import FOREVER, HANG_GUARD, Followed, Node, alive, until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the agent runs on Linux only (/proc)")


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


def test_a_line_reaches_its_followers_as_it_grows_and_once(node: Node) -> None:
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
    while b"half" not in data:
        data += os.read(follower.stdout.fileno(), 4096)
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
    failing = "import os, time\nwhile not os.path.exists('go'): time.sleep(0.02)\nraise SystemExit(7)\n"
    node.start(stubborn, failing, FOREVER)
    for rank in range(3):
        node.rank_pid(rank)  # each has one: what starts it takes signals by then
    until((node.project / "ready").exists)
    (node.project / "go").touch()
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
