"""`exec`: lines as they arrive, standard input, exit codes, Ctrl-C."""

from __future__ import annotations

import hashlib
import os
import random
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from support.harness import TIMEOUT, interrupt, wait_for
from support.processes import Process, zygote


def with_input(cli: Any, *words: str) -> tuple[Process, int]:
    """Start a command whose standard input is a pipe; return it and the descriptor to write to."""
    ours, theirs = os.pipe()
    process = zygote().start(("-m", "cloudddp", *words), cli.cwd, cli.env, stdin=open(ours))  # noqa: SIM115, PTH123
    cli.started.append(process)
    return process, theirs


def test_lines_arrive_while_the_command_runs_and_input_is_passed_on(cli: Any) -> None:
    """Of several nodes each line has the node; of one it is as it is. The end of the input arrives, too. A
    command that ends does not wait for its input."""
    cli.nodes(2)
    for words, expected in (
        (("exec", "--"), {"[node 0] got a\n", "[node 1] got a\n"}),
        (("exec", "--node", "1", "--"), {"got a\n"}),
    ):
        process, pipe = with_input(cli, *words, "while read -r word; do echo got $word; done; echo end")
        os.write(pipe, b"a\n")
        assert {process.stdout.readline() for _ in expected} == expected  # the input is still open
        os.close(pipe)
        out, err = process.communicate(timeout=TIMEOUT)
        assert (process.returncode, out.count("end"), err) == (0, len(expected), "")
    process, pipe = with_input(cli, "exec", "--node", "1", "--", "echo done")
    out, _ = process.communicate(timeout=TIMEOUT)
    os.close(pipe)
    assert (process.returncode, out) == (0, "done\n")


def test_input_is_streamed_to_nodes_of_different_speed(cli: Any, tmp_path: Path) -> None:
    """A node that ends before it has read its input holds up no other; memory is bounded."""
    cli.nodes(2)
    data = random.Random(1).randbytes(40 << 20)
    (tmp_path / "data").write_bytes(data)
    slow = "case $PWD in *{}*) exit 0;; esac; sleep 1; md5sum"
    home = cli.ok("exec", "--node", "0", "--", "echo $HOME").strip()
    with (tmp_path / "data").open("rb") as file:
        process = zygote().start(
            ("-m", "cloudddp", "exec", "--", slow.format(home.split("/")[-2])), cli.cwd, cli.env, stdin=file
        )
        cli.started.append(process)
        out, _ = process.communicate(timeout=TIMEOUT)
    assert out == f"[node 1] {hashlib.md5(data, usedforsecurity=False).hexdigest()}  -\n"
    assert process.peak_memory < 120 << 20


def test_exit_codes_are_listed_if_one_is_not_0(cli: Any) -> None:
    cli.nodes(2)
    home = cli.ok("exec", "--node", "1", "--", "echo $HOME").strip()
    done = cli("exec", "--", "sh", "-c", "echo $0 here", "two words")
    assert (sorted(done.stdout.splitlines()), done.stderr) == (
        [f"[node {k}] two words here" for k in (0, 1)],
        "",
    )
    done = cli("exec", "--", f'[ "$HOME" = {home} ] || exit 3; sh -c "kill -9 \\$\\$"')
    assert (done.returncode, done.stdout) == (137, "")
    assert done.stderr.endswith("NODE  EXIT CODE\n0     3\n1     137\n")


@pytest.mark.parametrize(
    ("number", "command"),
    [
        (signal.SIGINT, """setsid sh -c "trap '' INT; sleep {0}" & echo begun; sleep {0}"""),
        (signal.SIGHUP, "(sleep {0}) & echo begun; while :; do sleep 0.1; done"),
    ],
    ids=["in a session of its own, without Ctrl-C", "a loop of the shell"],
)
def test_interrupt_ends_the_commands_and_what_they_started(cli: Any, number: int, command: str) -> None:
    cli.nodes(2)
    seconds = f"31{time.time_ns() % 10**7}"
    process = cli.start("exec", "--", command.format(seconds))
    assert {process.stdout.readline() for _ in range(2)} == {"[node 0] begun\n", "[node 1] begun\n"}
    wait_for(lambda: len(sleepers(seconds)) >= 2, "they run")
    code, _, err = interrupt(process, number)
    assert (code, "may still run" in err) == (130, False), err
    assert sleepers(seconds) == []


def sleepers(seconds: str) -> list[str]:
    words = ["pgrep", "-fx", f"sleep {seconds}"]
    return subprocess.run(words, capture_output=True, text=True, check=False).stdout.split()
