"""A node on which a rank has replaced the agent by another program: how each command handles its replies.

The command must end with an error that names the node, in bounded memory, and must show no control
characters.
"""

from __future__ import annotations

import itertools
import re

import pytest
from support.badanswers import BAD_FRAMES, BAD_JOBS, BAD_PROBES, JUNK, PROBE, changed
from support.harness import TIMEOUT
from support.victim import Done, Victim

pytestmark = pytest.mark.xdist_group("victim")

MEMORY = 200 << 20  # bytes that a command may take, for any reply

OBEYED = re.compile(
    rb"[\x00-\x08\x0b-\x1f\x7f]|\xc2[\x80-\x9f]|\xe2\x80[\x8b\x8e\x8f\xa8-\xae]|\xe2\x81[\xa0-\xaf]"
)


def refused(done: Done, *, code: int = 1) -> None:
    assert done.code == code, done.err
    assert "node 0 sent an answer that cloudddp cannot read" in done.err or "longer than" in done.err, (
        done.err
    )
    assert_harmless(done)


def assert_harmless(done: Done) -> None:
    assert "a bug" not in done.err
    assert "Traceback" not in done.err
    assert done.memory < MEMORY, f"{done.memory >> 20} MiB"
    for name in ("out.txt", "err.txt"):
        with (done.folder / name).open("rb") as file:
            for piece in iter(lambda: file.read(1 << 20), b""):
                assert not (found := OBEYED.search(piece)), piece[
                    max(found.start() - 80, 0) : found.end() + 80
                ]


def test_invalid_probe_reply_is_refused(victim: Victim) -> None:
    """tests/node/test_protocol.py has what is invalid."""
    victim.answers("probe", str(BAD_PROBES["deep in a key"]))
    refused(victim("sync"))


NAMES = map("".join, itertools.product("abcdefghijklmnopqrstuvwxyz0123456789", repeat=4))
MANY = ",".join(f'"{name}":"{"0" * 16}"' for name in itertools.islice(NAMES, 570_000))


@pytest.mark.parametrize(
    "text", [MANY, MANY.replace('"0', ' "\\u0030')[: 15 << 20].rpartition(',"')[0]], ids=["plain", "escaped"]
)
def test_more_folders_than_a_project_has_take_bounded_memory(victim: Victim, text: str) -> None:
    victim.answers("probe", changed(PROBE).replace('"folders": null', f'"folders": {{{text}}}'))
    refused(victim("sync"))


def test_list_of_countless_jobs_takes_bounded_memory(victim: Victim) -> None:
    text = '{"x":[{},{}]}'
    victim.answers("jobs", '{"jobs":[' + ",".join([text] * (8_300_000 // (len(text) + 1))) + "]}")
    refused(victim("jobs"))


@pytest.mark.parametrize("verb", ["pull", "cancel"])
def test_invalid_job_id_never_becomes_a_path(victim: Victim, verb: str) -> None:
    before = sorted(victim.cli.cwd.rglob("*"))
    victim.answers("jobs", str(BAD_JOBS["id leaves the folder"]))
    refused(victim(verb))
    assert sorted(victim.cli.cwd.rglob("*")) == before


@pytest.mark.parametrize(
    "frames", ['reading {"at": "x"}\n', "end\n", "hello\n"], ids=["type", "another step", "junk"]
)
def test_invalid_reading_is_reported_as_the_reason_why_there_is_none(victim: Victim, frames: str) -> None:
    victim.answers("readings", frames)
    done = victim("top", "--once")
    assert "node 0 sent an answer that cloudddp cannot read" in (done.folder / "out.txt").read_text()
    assert_harmless(done)


def test_invalid_frame_ends_the_logs_and_names_the_node(victim: Victim) -> None:
    victim.answers("follow", [BAD_FRAMES["a frame of 100 GB"]])
    refused(victim("logs", "-f"))


@pytest.mark.parametrize(
    ("step", "verb", "endless"),
    [
        ("probe", ("sync",), "cat /dev/zero"),
        ("jobs", ("jobs",), "yes"),
        ("jobs", ("jobs",), "yes 'something to read' >&2"),
        ("follow", ("logs", "-f"), "cat /dev/zero"),
        ("kill", ("cancel",), "yes"),
    ],
    ids=itertools.count(),
)
def test_endless_reply_is_cut_off(victim: Victim, step: str, verb: tuple[str, ...], endless: str) -> None:
    victim.runs(step, endless)
    refused(victim(*verb))


@pytest.mark.parametrize(
    ("step", "answer"),
    [
        ("kill", '{"ended": "x"}'),
        ("receive", '{"written": {}}'),
        ("setup", JUNK["deep"]),
        ("start", JUNK["no JSON"]),
    ],
    ids=["kill", "receive", "setup", "start"],
)
def test_invalid_reply_of_other_steps_is_refused(victim: Victim, step: str, answer: str) -> None:
    victim.cli.write("done.py", f"print('done')  # {step}")
    victim.cli.write("cloudddp.toml", '[setup]\nrun = ["true"]\n' if step == "setup" else "")
    victim.answers(step, answer)
    if step == "receive":  # which gets input for as long as it runs
        victim.runs(step, f"head -c 100 > /dev/null; exec cat '{victim.evil / 'receive.data'}'")
    refused(victim("cancel") if step == "kill" else victim("launch", "done.py"))
    (victim.cli.cwd / "cloudddp.toml").unlink()


def test_cancel_of_a_job_that_goes_on_is_an_error(victim: Victim) -> None:
    victim.answers("kill", '{"ended": 0, "left": 0, "phase": "running"}')
    done = victim("cancel")
    assert done.code == 1
    assert "nothing of it was stopped, and node 0 reports it as running" in done.err
    assert "already ended" not in done.out
    assert_harmless(done)


def test_node_that_may_still_run_a_failed_launch_is_named(victim: Victim) -> None:
    for step in ("start", "kill"):
        victim.answers(step, JUNK["no JSON"])
    done = victim("launch", "done.py")
    refused(done)
    assert re.search(r"warning: job \S+ may still run on node 0; cancel it", done.err), done.err


def test_error_text_of_a_step_is_escaped(victim: Victim) -> None:
    victim.runs("jobs", r"printf '\033]0;owned\007 \302\233 \342\200\256 evil\r' >&2; exit 3")
    done = victim("jobs")
    assert done.code == 1
    assert r"\x1b]0;owned\x07" in done.err
    assert_harmless(done)


def test_agent_changed_during_a_job_is_shipped_again_to_end_it(victim: Victim) -> None:
    victim.cli.write(
        "replace.py",
        "import pathlib, time\n"
        "print('began', flush=True)\n"
        "while not pathlib.Path('go').exists(): time.sleep(0.05)\n"
        "[agent] = (pathlib.Path.home() / '.cloudddp').glob('agent-*/__main__.py')\n"
        "agent.write_text('print(0)')\n"
        "print('replaced', flush=True)\n"
        "raise SystemExit(7)\n",
    )
    process = victim.cli.start("launch", "replace.py")
    assert process.stdout is not None
    assert "began" in process.stdout.readline()  # the agent follows the rank
    (victim.home / "project" / "go").touch()
    _, err = process.communicate(timeout=TIMEOUT)
    assert process.returncode == 7, err
    assert "the launcher" not in err


ESCAPES = [
    r"\x1b]0;owned\x07",
    r"\x1b]52;c;b3duZWQ=\x07",
    r"\x1b[2J\x1b[H",
    r"\x9b2J",
    r"\u202etxt.exe",
    r"\u2066a\u2069",
    r"\x08\x08ok",
    r"\x1b[8mhidden",
    r"\x1bP+q544e\x1b\\",
    r"\u200b",
]


def test_escape_sequences_of_ranks_are_escaped(victim: Victim) -> None:
    prints = "".join(f'print("{number}:{escape}")\n' for number, escape in enumerate(ESCAPES))
    victim.cli.write(
        "escape.py", f'import sys\nsys.stdout.reconfigure(encoding="utf-8")\n{prints}raise SystemExit(5)\n'
    )
    done = victim("launch", "escape.py")
    assert done.code == 5, done.err
    for number in range(len(ESCAPES)):
        line = next(line for line in done.out.splitlines() if f"] {number}:" in line)
        assert "\\" in line, line  # written out
    assert_harmless(done)


def test_output_of_exec_takes_bounded_memory(victim: Victim) -> None:
    done = victim("exec", "--", "head -c 100000000 /dev/zero | tr '\\0' z; printf '\\033[2J\\n'")
    assert done.code == 0, done.err
    assert done.count(b"z") == 100_000_000
    assert_harmless(done)
