"""`logs` with its options: which lines are shown, and what a log may contain without harm."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import Any

import pytest
from support.harness import TIMEOUT, interrupt, wait_for
from support.jobs import direct, lines_by_rank, processes, written

COUNT = "import os\nr = os.environ['RANK']\nfor k in range(100): print(f'rank {r} line {k}')\n"


def wanted(rank: int, lines: range) -> list[str]:
    return [f"rank {rank} line {k}" for k in lines]


def test_ranks_and_nodes_are_selected(cli: Any) -> None:
    direct(cli, nodes=2, ranks=2)
    cli.write("count.py", COUNT)
    cli.ok("launch", "count.py")
    for words, ranks in (
        (("--rank", "0,2-3"), [0, 2, 3]),
        (("--rank", "0", "--rank", "1"), [0, 1]),
        (("--node", "0-1", "--rank", "1-2"), [1, 2]),
        (("--node", "0", "--rank", "3"), []),
        (("-f", "--node", "1", "--rank", "2"), [2]),
    ):
        shown = lines_by_rank(cli.ok("logs", *words))
        assert shown == {rank: wanted(rank, range(100)) for rank in ranks}, words
    only = lines_by_rank(cli.ok("logs", "--tail", "2"))
    assert only == {rank: wanted(rank, range(98, 100)) for rank in range(4)}
    found = lines_by_rank(cli.ok("logs", "--grep", r"line \d*7$", "--tail", "2", "--node", "0"))
    assert found == {rank: [f"rank {rank} line 87", f"rank {rank} line 97"] for rank in (0, 1)}
    assert cli.ok("logs", "--grep", "nothing has this") == ""
    rows = [json.loads(line) for line in cli.ok("logs", "--json", "--rank", "3", "--tail", "1").splitlines()]
    assert rows == [{"node": 1, "rank": 3, "line": "rank 3 line 99"}]
    assert cli.ok("logs", "--since", "1d").count("\n") == 400
    for words, text in (
        (("--rank", "4"), "has no rank 4"),
        (("--rank", "1-9"), "has no rank 4"),
        (("--node", "2"), "has no node 2"),
    ):
        done = cli("logs", *words)
        assert (done.returncode, text in done.stderr) == (2, True), done.stderr


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("--rank", "a"), "--rank 'a' is not a list of numbers"),
        (("--rank", "5-3"), "is not a list of numbers"),
        (("--rank", "-1"), "is not a list of numbers"),
        (("--rank", "0-999999999"), "is not a list of numbers"),
        (("--rank", ""), "is not a list of numbers"),
        (("--node", "1,"), "is not a list of numbers"),
        (("--since", "5"), "--since '5' is not a time"),
        (("--since", "-5m"), "is not a time"),
        (("--since", "9" * 5000 + "d"), "is not a time"),
        (("--tail", "-1"), "is not a number of lines"),
        (("--tail", "9" * 5000), "is not a number of lines"),
        (("--grep", "("), "is not a regular expression"),
        (("--raw", "--json"), "exclude each other"),
        (("-f", "--tail", "3", "--grep", "x"), "with -f, --tail and --grep exclude each other"),
    ],
)
def test_bad_options_are_refused_before_anything_is_called(
    cli: Any, words: tuple[str, ...], text: str
) -> None:
    done = cli("logs", *words)
    assert done.returncode == 2
    assert text in done.stderr
    assert "no cluster" not in done.stderr


def test_following_from_the_last_lines(cli: Any) -> None:
    direct(cli)
    cli.write(
        "gate.py",
        "import os, time\nfor k in range(50): print('old', k, flush=True)\n"
        "while not os.path.exists('gate'): time.sleep(0.05)\nprint('new', flush=True)\n",
    )
    cli.ok("launch", "-d", "gate.py")
    written(cli, "old 49", 1)
    follower = cli.start("logs", "-f", "--tail", "2")
    assert [follower.stdout.readline() for _ in range(2)] == [
        f"[rank 0 | node 0] old {k}\n" for k in (48, 49)
    ]
    cli.ok("exec", "touch gate")
    out, _ = follower.communicate(timeout=TIMEOUT)
    assert (out, follower.returncode) == ("[rank 0 | node 0] new\n", 0)


HOSTILE = r"""
import os
os.write(1, b"\x1b[31mred\x1b[0m \x1b]0;title\x07 \x1b[2J \xc2\x9b31m \xe2\x80\xae override \xe2\x80\x8b \x00\xff\n")
os.write(1, bytes(range(256)) + b"\n")
"""  # noqa: E501


def test_terminal_escapes_are_text_unless_raw(cli: Any, terminal: Any) -> None:
    direct(cli)
    cli.write("hostile.py", HOSTILE)
    cli.ok("launch", "hostile.py")
    shown = cli.ok("logs")
    assert shown.startswith(
        "[rank 0 | node 0] red \\x1b]0;title\\x07 \\x1b[2J \\x9b31m \\u202e override \\u200b \\x00\ufffd\n"
    )
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e\u200b]", shown)
    window = terminal("logs")
    window.read_until(b"override")
    assert b"\x1b[31mred\x1b[0m" in window.seen  # colours are kept on a terminal
    assert b"\\x1b]0;title" in window.seen
    assert b"\x1b]0;" not in window.seen
    raw = cli.ok("logs", "--raw")
    assert "[rank 0 | node 0] \x1b[31mred\x1b[0m \x1b]0;title\x07 \x1b[2J \x9b31m \u202e override" in raw
    first, *_ = [json.loads(line)["line"] for line in cli.ok("logs", "--json").splitlines()]
    assert first.startswith("\x1b[31mred\x1b[0m \x1b]0;title\x07")


def test_endless_line_takes_bounded_memory_and_is_cut(cli: Any, tmp_path: Path) -> None:
    """200 MB without a line break."""
    direct(cli)
    cli.write(
        "endless.py",
        "import os\nfor _ in range(200): os.write(1, b'\\x00' * 10**6)\nos.write(1, b'\\nafter\\n')\n",
    )
    cli.ok("launch", "-d", "endless.py")
    wait_for(lambda: processes(cli) == 0, "the job has ended")
    process = cli.to_files(tmp_path, "logs")
    assert process.returncode == 0, (tmp_path / "err.txt").read_text()
    cut, after = (tmp_path / "out.txt").read_text().splitlines()
    assert cut.endswith("\\x00 [line cut: 190.7 MiB more]")
    assert after == "[rank 0 | node 0] after"
    assert process.peak_memory < 200e6


def test_middle_of_a_long_log_is_dropped_and_reported(cli: Any) -> None:
    direct(cli)
    cli.write("cloudddp.toml", "[job]\nlog_mb = 1\n")
    cli.write("long.py", "for k in range(400_000): print(f'line {k:08}')\n")
    cli.ok("launch", "-d", "long.py")
    wait_for(lambda: processes(cli) == 0, "the job has ended")
    lines = lines_by_rank(
        wait_for(lambda: (out := cli.ok("logs")).count("dropped here") and out, "it is cut")
    )[0]
    assert (lines[0], lines[-1]) == ("line 00000000", "line 00399999")
    (note,) = [line for line in lines if "dropped here" in line]
    assert re.fullmatch(
        r"\[cloudddp: [3-5]\.\d MiB of this log were dropped here; it was longer than job\.log_mb\]", note
    )
    assert cli.ok("logs", "--tail", "3").count("\n") == 3


def test_progress_bar_is_shown_while_it_moves(cli: Any) -> None:
    direct(cli)
    cli.write(
        "bar.py",
        "import os, sys, time\n"
        "for k in range(10**6):\n"
        "    print(f'\\r{k:6} of many', end='', flush=True)\n    time.sleep(0.02)\n"
        "    if os.path.exists('stop'): break\n"
        "print('\\rfinal state')\n",
    )
    process = cli.start("launch", "bar.py", CLOUDDDP_TIME_SCALE="0.1")
    states = [process.stdout.readline() for _ in range(3)]
    assert all(re.fullmatch(r"\[rank 0 \| node 0\]  *\d+ of many\n", line) for line in states), states
    assert len(set(states)) == 3
    cli.ok("exec", "touch stop")
    out, _ = process.communicate(timeout=TIMEOUT)
    assert out.splitlines()[-1] == "[rank 0 | node 0] final state"


def test_silence_is_reported_with_the_last_output(cli: Any) -> None:
    direct(cli)
    cli.write(
        "silent.py",
        "import json, os, time\nprint('hello', flush=True)\n"
        "path = os.environ['CLOUDDDP_STATUS_FILE']\n"
        "open(path + '.new', 'w').write(json.dumps({'state': 'running', 'step': 120}))\n"
        "os.rename(path + '.new', path)\ntime.sleep(600)\n",
    )
    process = cli.start("launch", "silent.py", CLOUDDDP_TIME_SCALE="0.02")
    deadline, seen = time.monotonic() + TIMEOUT, []
    while not any("rank 0 was the last (step 120)" in line for line in seen) and time.monotonic() < deadline:
        seen.append(process.stderr.readline())
    job = json.loads(cli.ok("jobs", "--json"))[0]["id"]
    assert re.fullmatch(
        r"no output from any rank for \d+ (?:s|min); rank 0 was the last \(step 120\)\. "
        rf"`cloudddp .*stacks {job}` shows where each rank is\n",
        seen[-1],
    )
    assert any(f"waiting for the first output of job {job}" in line for line in seen)
    assert interrupt(process)[0] == 130
