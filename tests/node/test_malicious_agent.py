"""A node on which a rank has replaced the agent by another program: how each command handles its replies.

The command must end with an error that names the node, in bounded memory, and must show no control
characters. tests/unit/test_receive.py has all streams.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable
from pathlib import Path

import pytest
from support import streams
from support.harness import TIMEOUT
from support.streams import FINISH, file, listed, stream, tree
from support.victim import Done, Victim

from cloudddp.agent.protocol import file_steps
from cloudddp.agent.protocol.transfer import READING, UNSEALED, frame

pytestmark = pytest.mark.xdist_group("victim")

MEMORY = 200 << 20  # bytes that a command may take, for any reply

OBEYED = re.compile(
    rb"[\x00-\x08\x0b-\x1f\x7f]|\xc2[\x80-\x9f]|\xe2\x80[\x8b\x8e\x8f\xa8-\xae]|\xe2\x81[\xa0-\xaf]"
)


def refused(done: Done, *, code: int = 1) -> None:
    assert done.code == code, done.err
    why = "node 0 sent (an answer that cloudddp cannot read|results)|longer than"
    assert re.search(why, done.err), done.err
    assert done.out == ""
    assert_harmless(done)


def assert_harmless(done: Done) -> None:
    assert "a bug" not in done.err
    assert "Traceback" not in done.err
    assert done.memory < MEMORY, f"{done.memory >> 20} MiB"
    for name in ("out.txt", "err.txt"):
        with (done.folder / name).open("rb") as file:
            for piece in iter(lambda: file.read(1 << 20), b""):
                found = OBEYED.search(piece)
                assert not found, piece[max(found.start() - 80, 0) : found.end() + 80]


COUNTLESS = '{"jobs":[' + ",".join(['{"x":[{},{}]}'] * 590_000) + "]}"  # 8 MB


@pytest.mark.parametrize(
    ("step", "answer", "verb"),
    [
        ("probe", '{"x": ' + "[" * 100_000 + "]" * 100_000 + "}", "sync"),
        ("jobs", COUNTLESS, "jobs"),
        ("jobs", '{"jobs": [{"job": "z/../../.ssh", "node": 0, "phase": "running", "ranks": []}]}', "pull"),
        ("follow", b"Traceback: more\n", "logs -f"),
        ("kill", '{"ended": "x"}', "cancel"),
        ("receive", "#!head -c 100 > /dev/null; echo '{\"written\": {}}'", "launch done.py"),
        ("setup", "[" * 100_000, "launch done.py"),
        ("start", "hello\n", "launch done.py"),
        ("pack", streams.attack("zeros-without-end"), "pull runs"),
        ("pack", streams.attack("dot-dot"), "pull runs"),
        ("probe", "#!cat /dev/zero", "sync"),
        ("jobs", "#!yes 'something to read' >&2", "jobs"),
        ("follow", "#!cat /dev/zero", "logs -f"),
    ],
    ids=itertools.count(),
)
def test_invalid_reply_is_refused(
    victim: Victim, step: str, answer: str | bytes | Iterable[bytes], verb: str
) -> None:
    """An endless one, from a script, too. Nothing of it becomes a path. tests/node/test_protocol.py has what
    is invalid."""
    victim.cli.write("done.py", f"print('done')  # {step}")
    settings = victim.cli.write("cloudddp.toml", '[setup]\nrun = ["true"]\n' if step == "setup" else "")
    if isinstance(answer, str) and answer.startswith("#!"):
        victim.runs(step, answer[2:])
    else:
        victim.answers(step, [answer] if isinstance(answer, bytes) else answer)
    before = tree(victim.laptop)
    refused(victim(*verb.split()))
    assert "launch" in verb or tree(victim.laptop) == before
    settings.unlink()


def test_invalid_reading_is_reported_as_the_reason_why_there_is_none(victim: Victim) -> None:
    victim.answers("readings", [frame(UNSEALED, READING, body=b'{"at": "x"}')])
    done = victim("top", "--once")
    assert "node 0 sent an answer that cloudddp cannot read" in (done.folder / "out.txt").read_text()
    assert_harmless(done)


def test_cancel_of_a_job_that_goes_on_is_an_error(victim: Victim) -> None:
    victim.answers("kill", '{"ended": 0, "left": 0, "phase": "running"}')
    done = victim("cancel")
    assert done.code == 1
    assert "nothing of it was stopped, and node 0 reports it as running" in done.err
    assert "already ended" not in done.out
    assert_harmless(done)


def test_node_that_may_still_run_a_failed_launch_is_named(victim: Victim) -> None:
    for step in ("start", "kill"):
        victim.answers(step, "hello\n")
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


ESCAPES = r"""\x1b]0;owned\x07 \x1b]52;c;b3duZWQ=\x07 \x1b[2J\x1b[H \x9b2J \u202etxt.exe \u2066a\u2069
    \x08\x08ok \x1b[8mhidden \x1bP+q544e\x1b\\ \u200b""".split()


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
    usual = victim("exec", "true").memory
    done = victim("exec", "--", "head -c 25000000 /dev/zero | tr '\\0' z; printf '\\033[2J\\n'")
    assert (done.code, done.count(b"z")) == (0, 25_000_000), done.err
    assert done.memory - usual < 12 << 20
    assert_harmless(done)


# -- `pull` from a node that a rank controls: only what was requested is written -----------------------------


def test_node_that_chooses_the_names_replaces_no_files_of_the_project_or_the_home(
    victim: Victim, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without paths and without configured outputs, every name counts as requested."""
    monkeypatch.setitem(victim.cli.env, "HOME", str(tmp_path))
    victim.answers("pack", stream(file("train.py"), file(".bashrc"), FINISH))
    before = tree(victim.laptop)
    for to in (".", str(tmp_path)):
        done = victim("pull", "--to", to)
        assert done.code == 2, done.err
        assert "the nodes choose" in done.err
    assert tree(victim.laptop) == before
    assert [*tmp_path.iterdir()] == []


def test_names_and_notes_are_escaped(victim: Victim, tmp_path: Path) -> None:
    evil = "runs/\x1b]0;owned\x07\u202egpj.\n.exe"
    missing = file_steps.left_out("\x1b]52;c;x\x07", "", counts=False)
    out_of = file_steps.left_out("\x1b[2Ka\x9b1m\r", "\x07", counts=False)
    files = (file(evil), file("runs/\udcff"), file("runs/cloudddp.toml\u202e\x1b[2J"))
    victim.answers("pack", stream(*files, listed("runs/\x1b/cloudddp.toml"), out_of, missing, FINISH))
    done = victim("pull", "--to", str(tmp_path / "to"))
    assert done.code == 1, done.err
    assert not {"\x1b", "\x07", "\x9b", "\u202e", "\r"} & set(done.out + done.err)
    assert "left out \\x1b[2Ka" in done.err
    assert "left out runs/\\x1b/cloudddp.toml" in done.err
    assert (tmp_path / "to" / evil).exists()
    assert (tmp_path / "to" / "runs" / "\udcff").exists()


def test_endless_messages_are_cut_off(victim: Victim, tmp_path: Path) -> None:
    """Of lines, and of a line without end."""
    flood = "yes 'missing x' | head -c 120000000 >&2; head -c 120000000 /dev/zero | tr '\\0' x >&2"
    victim.answers("pack", stream(file("runs/a"), FINISH), flood)
    done = victim("pull", "--to", str(tmp_path / "to"))
    assert done.code == 1, done.err
    assert "its answer is longer than 4 MiB and was cut off" in done.err
    assert len(done.out + done.err) < 100_000
    assert done.memory < MEMORY


def test_state_folder_is_never_written(victim: Victim, tmp_path: Path) -> None:
    home = Path(victim.cli.env["CLOUDDDP_HOME"])
    victim.answers("pack", stream(file("runs/a"), FINISH))
    before = (home / "sim" / "sim.json").read_bytes()
    done = victim("pull", "--to", str(home / "new"))
    assert done.code == 2, done.err
    assert "CLOUDDDP_HOME" in done.err
    victim.answers("pack", stream(file(f"{home.name}/sim/sim.json"), file(f"{home.name}/planted"), FINISH))
    done = victim("pull", "--to", str(home.parent), home.name)
    assert "left out" in done.err, done.err
    assert (home / "sim" / "sim.json").read_bytes() == before
    assert not (home / "planted").exists()
