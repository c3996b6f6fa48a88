"""What a node sends when something happens to a job, with nobody connected: real agents, sockets and
commands."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import ssl
import subprocess
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
from support.agentnode import Node, gone, processes_of, until
from support.exposed import files_with
from support.gangs import Make
from support.programs import first_on_path
from support.webhooks import SECRET, Webhook

from agent.jobs import job_record
from agent.node import store
from cloudddp.agent.protocol.jobs import MAX_LINE, Cause, Failure, Verdict
from cloudddp.agent.protocol.phases import JobPhase
from cloudddp.agent.protocol.start import Deadline

TOKEN = "hunter2-the-value-of-a-variable"
ENV = {"TOKEN": TOKEN, "CLOUDDDP_CLUSTER": "demo"}
SLEEP = "import time\nopen('ready', 'w').close()\ntime.sleep(600)\n"
FAILS = "import os\nraise RuntimeError('<!channel> no login with ' + os.environ['TOKEN'])\n"
REPORTS = (
    "import json, os\n"
    "open(os.environ['CLOUDDDP_STATUS_FILE'], 'w').write(json.dumps({'step': 120, 'steps': 3000}))\n"
)


@pytest.fixture
def hook() -> Iterator[Webhook]:
    server = Webhook()
    yield server
    server.close()


def log(node: Node) -> str:
    path = node.folder() / "launcher.log"
    return path.read_text() if path.exists() else ""


def test_failure_is_sent_once_with_what_failed_first_and_no_secret(gangs: Make, hook: Webhook) -> None:
    gang = gangs(2)
    gang.start(SLEEP, FAILS, env=ENV, grace=0.0, notify=hook.url, usd_hour=36_000.0)
    found = hook.wait("failed")
    gang.gone()
    assert hook.wait("failed") == found, "one node sends it"
    assert found["usd"] == pytest.approx(10 * max(found["seconds"], 60), abs=0.6)
    expected = {"job": gang[0].id(), "cluster": "demo", "node": 1, "rank": 1, "exit_code": 1}
    assert {name: found[name] for name in expected} == expected
    assert (
        found["text"] == found["content"] == f"[failed] script.py (job {gang[0].id()}) on cluster demo after "
        f"{timedelta(seconds=round(found['seconds']))}, at most ${found['usd']:.2f}: "
        "rank 1 on node 1 exited with code 1: RuntimeError: < !channel> no login with ****"
    )
    assert hook.paths == [f"/services/{SECRET}?a=b"]
    homes = [one.home for one in gang.nodes]
    assert files_with(SECRET, *homes) == []
    assert sorted(path.name for path in files_with(TOKEN, *homes)) == [
        "1.log",
        "verdict.json",
        "verdict.json",
    ]
    masked = json.loads((gang[0].folder() / "masked.json").read_text())  # for the report
    assert masked["last_lines"][-1] == "RuntimeError: <!channel> no login with ****"


def test_report_gets_what_programs_wrote_without_values(
    node: Node, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The text of an exception that torch.distributed.elastic records, too."""
    monkeypatch.setattr(store, "ROOT", tmp_path)
    request = node.starting("", env={**ENV, "KEY": "first-line\nsecond-line"}, notify="https://x.test/secret")
    record = job_record.JobRecord(request)
    record.folder.mkdir(parents=True)
    first = Failure(0, Cause.RANK, rank=0, exit_code=1, detail=f"no login with {TOKEN}")
    cut = ("demo" * 300)[: MAX_LINE - 8] + TOKEN[:8]  # as the environment that a program prints
    record.end(Verdict(JobPhase.FAILED, 1, 0, first, ("demo", "second-line", "https://x.test/secret", cut)))
    lines = ["demo", "****", "****", cut[:-8] + "****"]
    found = json.loads((record.folder / "masked.json").read_text())
    assert found == {"detail": "no login with ****", "last_lines": lines}


@pytest.mark.parametrize(("status", "tries"), [(500, 2), (404, 1)])
def test_answer_that_is_no_success_is_noted(node: Node, hook: Webhook, status: int, tries: int) -> None:
    """A redirect is not followed."""
    hook.status = status
    node.start(REPORTS, env=ENV, notify=hook.url)
    note = f"notification of 'succeeded' was not sent: 127.0.0.1: HTTP {status}"
    until(lambda: note in log(node))
    assert note not in (node.folder() / "ranks" / "0.log").read_text(), "`logs` would show it twice"
    assert len(hook.paths) == tries
    gone(node.home)
    assert note in (node.folder() / "supervisor.log").read_text()
    assert files_with(SECRET, node.home) == []


@pytest.fixture
def ordered(node: Node, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What the node has asked sudo for: its end."""
    first_on_path(monkeypatch, tmp_path / "bin" / "sudo", 'echo "$@" >> ~/sudo.log')
    return node.home / "sudo.log"


def test_delivery_that_never_ends_delays_no_job_and_the_node_ends(
    node: Node, hook: Webhook, ordered: Path
) -> None:
    """A server that answers byte by byte, and a delivery that cannot even end itself: its disk hangs."""
    hook.status = None
    began = time.monotonic()
    node.start(REPORTS, env=ENV, notify=hook.url)
    node.ended()
    node.start(REPORTS, job="job-2", notify="kill -STOP $PPID; sleep 600", poweroff=0.0)
    assert node.ended("job-2").exit_code == 0
    assert time.monotonic() - began < 15
    until(ordered.exists)
    assert time.monotonic() - began < 40
    assert "was not sent: it took longer than 20 s" in log(node)
    for pid in processes_of(node.home):
        os.kill(pid, signal.SIGKILL)


def test_certificate_is_verified(node: Node, hook: Webhook, tmp_path: Path) -> None:
    key, certificate = tmp_path / "key", tmp_path / "certificate"
    words = "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 -subj /CN=localhost"
    files = ["-keyout", str(key), "-out", str(certificate)]
    subprocess.run(["openssl", *words.split(), *files], check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    hook.socket = context.wrap_socket(hook.socket, server_side=True)
    node.start(REPORTS, notify=f"https://localhost:{hook.server_port}/{SECRET}")
    until(lambda: "was not sent: localhost: [SSL: CERTIFICATE_VERIFY_FAILED]" in log(node))
    assert hook.bodies == []


def test_node_powers_off_after_the_verdict_was_sent(node: Node, hook: Webhook, ordered: Path) -> None:
    hook.delay = 2.0
    node.start(REPORTS, env=ENV, notify=hook.url, poweroff=0.0)
    until(lambda: ordered.exists() or hook.bodies)
    assert not ordered.exists()
    until(ordered.exists)


def test_command_gets_the_event_and_the_variables(node: Node) -> None:
    """What a rank wrote is data: neither the shell nor the list of processes gets it."""
    command = "env > event; echo said; touch began; while [ ! -e go ]; do sleep 0.05; done; exit 3"
    node.start(
        "raise RuntimeError('$(touch hacked); `touch hacked`')\n",
        env=ENV,
        notify=f"{command}; : {SECRET}",
        paths={"CLOUDDDP_DATA_X": "x"},
    )
    until((node.project / "began").exists)
    for pid in processes_of(node.home):
        assert SECRET not in Path(f"/proc/{pid}/cmdline").read_text()
    (node.project / "go").touch()
    until(lambda: "notification of 'failed' was not sent: the command exited with code 3" in log(node))
    lines = (node.project / "event").read_text().splitlines()
    given = dict(line.split("=", 1) for line in lines if "=" in line)
    expected = {"TOKEN": TOKEN, "CLOUDDDP_EVENT": "failed", "CLOUDDDP_JOB": node.id(), "CLOUDDDP_RANK": "0"}
    expected["CLOUDDDP_DATA_X"] = str(node.project / "x")
    assert {name: given[name] for name in expected} == expected
    assert "$(touch hacked); `touch hacked`" in given["CLOUDDDP_TEXT"]
    assert "CLOUDDDP_ALLOWED_MENTIONS" not in given
    assert not (node.project / "hacked").exists()
    assert "said" in (node.folder() / "supervisor.log").read_text()
    gone(node.home)
    assert files_with(SECRET, node.folder()) == []


def test_command_that_cannot_run_is_noted(node: Node) -> None:
    node.start("", notify="true; ./no-such-file")
    noted = "notification of 'succeeded' was not sent: the command was not found on the node"
    until(lambda: noted in log(node))


def test_deadline_is_announced_by_the_first_node_only(gangs: Make, hook: Webhook) -> None:
    gang = gangs(2)
    deadline = Deadline(1799.0, "2030-01-01 12:00 UTC")
    gang.start(SLEEP, SLEEP, env=ENV, grace=0.0, notify=hook.url, deadline=deadline)
    found = hook.wait("deadline")
    job = f"[deadline] script.py (job {gang[0].id()})"
    assert found["text"].startswith(f"{job} on cluster demo, running for 0:00:0")
    assert found["text"].endswith(f": the cluster's deadline is at {deadline.at}")
    until(lambda: all((one.project / "ready").exists() for one in gang.nodes))  # nodes look before that
    gang[1].cancel(grace=0.0)
    gang.gone()
    assert hook.wait("deadline", "cancelled")["text"].startswith("[cancelled] script.py")


def test_next_node_sends_the_verdict_where_the_first_one_dies(gangs: Make, hook: Webhook) -> None:
    gang = gangs(2)
    gang.start(SLEEP, SLEEP, env=ENV, grace=0.0, notify=hook.url)
    until(lambda: all((one.project / "ready").exists() for one in gang.nodes))
    for pid in processes_of(gang[0].home):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    found = hook.wait("failed")
    assert found["node"] == 0
    gang.gone()
    hook.wait("failed")
