"""On a terminal: its width, its colours, a question answered with no."""

from __future__ import annotations

import json
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from support.harness import interrupt, wait_for
from support.terminal import Terminal

COLUMNS = 80


def at_terminal(cli: Any, *words: str, answer: bytes = b"", **env: str) -> tuple[int, str]:
    """Run a command on a terminal; return its exit code and everything it printed."""
    environment = {k: v for k, v in {**cli.env, **env}.items() if k != "COLUMNS"}
    window = Terminal(replace(cli, env=environment), *words)
    os.write(window.ours, answer)
    return window.read_to_the_end()


def test_no_color_is_honoured_unless_empty(cli: Any) -> None:
    for value, colours in (("1", False), ("", True)):
        code, shown = at_terminal(cli, "up", "-n", "0", NO_COLOR=value)
        assert code == 2
        assert "cloudddp: " in shown
        assert ("\x1b[" in shown) == colours


def test_manual_lists_the_short_form_of_help() -> None:
    from cloudddp.cli.commands.clusters import up
    from docs import reference

    # Without the group: click keeps the help option that it creates here.
    up.get_help(up.make_context("up", [], resilient_parsing=True))
    page = reference.PAGES["docs/commands.md"]()
    assert page.count("-h, --help") == page.count("```text")


def test_ctrl_c_during_imports_shows_no_traceback(cli: Any, tmp_path: Path) -> None:
    """Imports may take seconds, from a cold disk."""
    seen = tmp_path / "imports"
    (tmp_path / "click.py").write_text(
        f"import pathlib, time\npathlib.Path({str(seen)!r}).touch()\ntime.sleep(600)\n"
    )
    process = cli.start("ls", PYTHONPATH=str(tmp_path), cold=True)
    wait_for(seen.exists, "click is imported")
    assert interrupt(process) == (130, "", "cloudddp: interrupted\n")


def test_step_of_up_shows_its_time_and_a_warning_is_printed_once(cli: Any, conditions: Any) -> None:
    """A step that lasts shows its time; a warning is printed once and does not become the step."""
    conditions(boot={"failed_gpus": 1, "ssh_seconds": 3})
    try:
        words = ("up", "-n", "1", "-t", "g5.12xlarge", "--allow-cpu")
        code, shown = at_terminal(cli, *words, CLOUDDDP_TIME_SCALE="0.1")
    finally:
        conditions(boot={"failed_gpus": None, "ssh_seconds": None})
    assert code == 0, shown
    assert re.search(r"waiting for SSH on every node, for up to 30 min[^\x1b]*\(\d+ s\)", shown), shown
    assert shown.count("shows 3 of 4 GPUs") == 1, shown
    assert not re.search(r"3 of 4 GPUs[^\n]*\n?[^\n]*\(\d+\.\d s\)", shown)


def test_plan_breaks_at_words_and_answering_no_changes_nothing(cli: Any, faults: Any) -> None:
    del cli.env["CLOUDDDP_YES"]
    words = ("up", "-n", "2", "-t", "g5.12xlarge", "--zones", "us-east-1a,us-east-1b,us-east-1c,us-east-1d")
    code, shown = at_terminal(cli, *words, answer=b"n\n")
    assert code == 1
    assert "nothing was changed" in shown
    assert "interrupted" not in shown
    assert "RunInstances" not in faults.calls
    plan = shown[shown.index(f"cluster {cli.cluster}") : shown.index("Start these")].splitlines()
    assert max(map(len, plan)) <= COLUMNS, shown
    labels = [line for line in plan if line[:3].strip() and line.startswith("  ")]
    assert labels and all(line[:12].strip() == "" or line in labels or line == plan[0] for line in plan)
    for word in ("counted", "us-east-1b", "us-east-1d"):
        assert word in shown
    assert max(map(len, cli("up", "-n", "2").stderr.splitlines())) > COLUMNS


def test_doctor_is_aligned_and_breaks_at_words(cli: Any) -> None:
    code, shown = at_terminal(cli, "doctor", "-n", "2")
    assert code == 0, shown
    shown = shown.replace(cli.env["CLOUDDDP_HOME"], "/state")  # a path is not broken, however long it is
    assert max(map(len, shown.splitlines())) <= COLUMNS
    at = shown.splitlines()[0].index("/")
    assert all(line[at - 1] == " " and line[at] != " " for line in shown.splitlines()), shown
    subnets = json.loads(cli.ok("doctor", "--json"))
    detail = next(one["detail"] for one in subnets if one["name"] == "network")
    assert all(subnet in shown for subnet in re.findall(r"subnet-\w+", detail))


def test_error_breaks_at_words_and_keeps_commands_whole(cli: Any) -> None:
    _, shown = at_terminal(cli, "--region", "us-east-1", "exec", "-c", "a-cluster-that-is-not", "--", "true")
    assert "`cloudddp -c a-cluster-that-is-not --region us-east-1 up`" in shown
    assert max(map(len, shown.splitlines())) <= COLUMNS + 10  # sequences of colours


def test_ports_are_forwarded_by_options_before_or_after_the_node(cli: Any, tmp_path: Path) -> None:
    """An option of cloudddp inside `-L6006:localhost:6006` is none."""
    fake = tmp_path / "bin" / "ssh"
    fake.parent.mkdir()
    fake.write_text('#!/bin/sh\nfor word; do echo "$word"; done\n')
    fake.chmod(0o755)
    cli.env["PATH"] = f"{fake.parent}:{cli.env['PATH']}"
    cli.nodes(2)
    forms = {
        ("-L", "6006:localhost:6006", "1"): ["-L", "6006:localhost:6006", "HOST"],
        ("-NL6006:localhost:6006", "1", "true"): ["-NL6006:localhost:6006", "HOST", "true"],
        ("-NL", "6006:localhost:6006"): ["-NL", "6006:localhost:6006", "HOST"],
        ("1", "-L", "6006:localhost:6006"): ["HOST", "-L", "6006:localhost:6006"],
        ("-c", cli.cluster, "1", "ls", "-c"): ["HOST", "ls", "-c"],
    }
    for words, expected in forms.items():
        given = cli.ok("ssh", *words).splitlines()
        found = ["HOST" if re.fullmatch(rf"{cli.cluster}-[01]", word) else word for word in given]
        assert found[-len(expected) :] == expected, words
    assert cli("ssh", "one").returncode == 2
