"""`logs` with its options: which lines are shown, and what a log may contain without harm."""

from __future__ import annotations

import json
import re
from typing import Any

from support.harness import TIMEOUT
from support.jobs import direct, homes, lines_by_rank, written

COUNT = "import os\nr = os.environ['RANK']\nfor k in range(100): print(f'rank {r} line {k}')\n"


def test_ranks_nodes_and_lines_are_selected(cli: Any) -> None:
    direct(cli, nodes=2, ranks=2)
    cli.write("count.py", COUNT)
    cli.ok("launch", "count.py")
    for words, ranks, lines in (
        (("-f", "--node", "0-1", "--rank", "0,2", "--rank", "3"), [0, 2, 3], range(100)),
        (("--grep", r"line \d*7$", "--tail", "2", "--since", "1d", "--node", "0"), [0, 1], (87, 97)),
        (("--node", "0", "--rank", "3"), [], ()),
    ):
        shown = lines_by_rank(cli.ok("logs", *words))
        assert shown == {rank: [f"rank {rank} line {k}" for k in lines] for rank in ranks}, words
    row = json.loads(cli.ok("logs", "--json", "--rank", "3", "--tail", "1"))
    assert row == {"node": 1, "rank": 3, "line": "rank 3 line 99"}
    assert "has no rank 4" in cli.fails(2, "logs", "--rank", "1-9")


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
    (homes(cli)[0] / "project/gate").touch()
    out, _ = follower.communicate(timeout=TIMEOUT)
    assert (out, follower.returncode) == ("[rank 0 | node 0] new\n", 0)


HOSTILE = r"""
import os
os.write(1, b"\x1b[31mred\x1b[0m \x1b]0;title\x07 \x1b[2J \xc2\x9b31m \xe2\x80\xae override \xe2\x80\x8b \x00\xff\n")
os.write(1, bytes(range(256)) + b"\ntick \xe2\x9c\x93\n")
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
    assert "tick ?" in cli.ok("logs", PYTHONIOENCODING="latin-1")
    raw = cli.ok("logs", "--raw")
    assert "[rank 0 | node 0] \x1b[31mred\x1b[0m \x1b]0;title\x07 \x1b[2J \x9b31m \u202e override" in raw
    first, *_ = [json.loads(line)["line"] for line in cli.ok("logs", "--json").splitlines()]
    assert first.startswith("\x1b[31mred\x1b[0m \x1b]0;title\x07")
