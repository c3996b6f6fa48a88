"""Random command lines and configuration files: each ends with an exit code and a message."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest
from support import fuzz
from support.fuzz import Case
from support.harness import ROOT, TIMEOUT, clean_environment
from support.processes import CLOSED, Stream, zygote
from support.web import Handler, Server

COUNT = 50
CODES = {0, 1, 2, 3, 130}
CRASHES = re.compile(r"a bug in cloudddp|Traceback|Exception ignored|Fatal Python error")
UNSAFE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")
ERROR = "<Response><Errors><Error><Code>{}</Code><Message>{}</Message></Error></Errors><RequestID>1</RequestID></Response>"  # noqa: E501
ANSWERS = [  # status, body; one for each case, by its seed. All of them are refusals
    (403, ERROR.format("UnauthorizedOperation", "You are not authorized.").encode()),
    (400, ERROR.format("InvalidParameterValue", "&#27;? \u202e \u0085 " + "m" * 5000).encode()),
    (400, ERROR.format("", "").encode()),
    (400, b""),
    (403, b"<html>proxy"),
    (403, b"\xff\xfe\x00"),
    (401, ERROR.format("AuthFailure", "x").encode()),
    (404, b'{"__type": "x"}'),
]


class Refusing(Handler, BaseHTTPRequestHandler):
    """An endpoint that refuses every call, with hostile answers."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        seed = self.path.strip("/").split("/")[0]
        self.answer(*ANSWERS[int(seed) % len(ANSWERS) if seed.isdecimal() else 0])

    do_GET = do_PUT = do_POST  # noqa: N815


@pytest.fixture(scope="module")
def refusing() -> Iterator[str]:
    server = Server(Refusing)
    yield f"http://{server.address}"
    server.close()


def test_every_command_line_ends_with_an_exit_code_and_a_message(tmp_path: Path, refusing: str) -> None:
    ended = fuzz.outcomes(COUNT, tmp_path, refusing)
    assert [fault for outcome in ended for fault in faults(*outcome)] == []
    # Neither a simulator nor a cluster was started.
    assert not list(tmp_path.glob("*/state/sim/sim.json"))
    assert not list(tmp_path.glob("*/state/clusters/*/id_ed25519"))


def faults(case: Case, code: int, out: str, err: str) -> Iterator[str]:
    about = f"seed {case.seed}, {case.words!r:.300}"
    if code not in CODES:
        yield f"{about}: exit {code}: {err[-500:]!r}"
    shown = out + err
    if found := CRASHES.search(shown):
        yield f"{about}: {shown[found.start() :][-700:]!r}"
    if found := UNSAFE.search(shown) or re.search("[\udc80-\udcff]", shown):
        yield f"{about}: shows {found.group()!r}: {shown[max(found.start() - 80, 0) : found.end() + 40]!r}"
    if code in (1, 2) and not err.strip():
        yield f"{about}: exit {code} without a message"


def checked(code: int, shown: str) -> tuple[int, str]:
    assert code in CODES, shown
    assert not CRASHES.search(shown), shown
    assert not UNSAFE.search(shown), shown
    return code, shown


# -- chosen streams, files and variables ---------------------------------------------------------------------


@dataclass(frozen=True)
class Place:
    """A project folder for one command, and its environment."""

    project: Path
    env: dict[str, str]

    def __call__(self, *words: str, env: dict[str, str] | None = None, **streams: Stream) -> tuple[int, str]:
        """Return the exit code and the output of `cloudddp WORDS`, forked from a process that has made the
        imports."""
        argv = ("-m", "cloudddp", *words)
        mine = {**self.env, **(env or {})}
        assert zygote().can_fork(argv, mine)
        process = zygote().start(argv, self.project, mine, **streams)
        out, err = process.communicate(timeout=TIMEOUT)
        assert process.returncode is not None
        return checked(process.returncode, out + err)

    def in_shell(
        self, words: str, *, before: str = ":", redirect: str = "", program: str = "-m cloudddp", **env: str
    ) -> tuple[int, str]:
        """The same, in a process of its own that a shell starts after `before`."""
        done = subprocess.run(
            ["sh", "-c", f'{before}\nexec "$0" {program} "$@" {redirect}', sys.executable, *words.split()],
            cwd=self.project,
            env={**self.env, "PYTHONPATH": str(ROOT), **env},
            timeout=TIMEOUT,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="surrogateescape",
            check=False,
        )
        return checked(done.returncode, done.stdout + done.stderr)


@pytest.fixture
def place(tmp_path: Path, refusing: str) -> Place:
    project = tmp_path / "project"
    project.mkdir()
    aws = {"AWS_REGION": "us-east-1", "AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "x"}
    env = clean_environment(CLOUDDDP_HOME=str(tmp_path / "state"), AWS_ENDPOINT_URL=refusing, **aws)
    return Place(project, env)


VERBS = ["ls", "init"]
STREAMS: list[dict[str, Stream]] = [
    {"stdout": CLOSED},
    {"stderr": CLOSED},
    {"stdin": CLOSED, "stdout": CLOSED, "stderr": CLOSED},
]


@pytest.mark.parametrize("verb", VERBS)
def test_verb_survives_closed_and_full_streams(place: Place, verb: str) -> None:
    with open("/dev/full", "wb") as full:  # noqa: PTH123
        code, shown = place(*verb.split(), stdout=full)
        place(*verb.split(), stderr=full)
    for closed in STREAMS:
        place(*verb.split(), **closed)
    if verb == "init":  # it is not taken for a full folder
        assert (code, "cannot write the output: No space left on device" in shown) == (1, True), shown


# -- separate processes, for conditions that a forked process cannot have ------------------------------------


@pytest.mark.parametrize("redirect", ["<&- >&- 2>&-", "2> /dev/full"])
def test_verb_survives_streams_closed_by_a_shell(place: Place, redirect: str) -> None:
    place.in_shell("ls", redirect=redirect)


@pytest.mark.parametrize("verb", ["--help", "up -y"])
def test_deleted_current_folder(place: Place, verb: str) -> None:
    gone = "mkdir gone; cd gone; rmdir ../gone"
    code, output = place.in_shell(verb, before=gone, CLOUDDDP_HOME="state")
    expected = (0, False) if verb == "--help" else (2, True)
    assert (code, "the current folder no longer exists" in output) == expected, output


@pytest.mark.parametrize(
    ("verb", "home"), [("ls", "unset HOME"), ("ls", "HOME=relative"), ("sim status", "HOME=/dev/null")]
)
def test_user_without_a_home(place: Place, verb: str, home: str) -> None:
    """Run by a uid without an account, as in a container, so that only HOME names the home."""
    before = f"unset CLOUDDDP_HOME; {home}; export HOME" if "=" in home else f"unset CLOUDDDP_HOME; {home}"
    place.in_shell(verb, before=before, program=f'-c "{AS_NOBODY}"')
    assert list(place.project.iterdir()) == []


# The modules may lie where that user cannot read them, so they are imported before the uid changes.
AS_NOBODY = """
import os, sys, click, botocore.session, moto, msgspec, platformdirs, cloudddp.cli.entry_point, cloudddp.aws.client, cloudddp.__main__, cloudddp.config.settings
import cloudddp.cli.actions.up, cloudddp.cli.actions.status, cloudddp.cli.actions.simulator, cloudddp.cli.commands.clusters
import cloudddp.cli.commands.simulator, cloudddp.cluster.connect, cloudddp.simulator.control
if os.getuid() == 0: os.setgroups([]); os.setgid(54321); os.setuid(54321)
sys.argv[0] = 'cloudddp'
cloudddp.__main__.main()
"""  # noqa: E501


def test_ascii_terminal(place: Place) -> None:
    locale = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    code, output = place.in_shell("-c ünï\udcff status", **locale)
    assert (code, "is not allowed" in output) == (2, True)


# -- defects that the random cases found ---------------------------------------------------------------------


@pytest.mark.parametrize("make", ["mkfifo", "ln -s /dev/zero", "truncate -s 2M"])
def test_configuration_that_is_not_a_regular_file(place: Place, make: str) -> None:
    subprocess.run([*make.split(), "odd"], cwd=place.project, check=True)
    code, output = place("--config", "odd", "jobs")
    assert (code, "odd" in output) == (2, True), output
