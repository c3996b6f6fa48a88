"""Notifies of what happens to a job, with nobody connected.

The guard of a job sends: it outlives its supervisor, which passes events to it. The verdict is sent by the
node that has decided it. Each delivery is a process with a time limit of its own (`main`), for which only the
end of the node waits. It gets what it needs on stdin, since a URL may be a secret.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import replace
from datetime import timedelta
from typing import Any, Optional
from urllib.parse import urlsplit, urlunsplit

from agent.jobs import job_record, phases, rank_records
from agent.node import store
from agent.node.commands import activated, agent_command, program, variables
from cloudddp.agent.protocol.codec import MAX_TEXT, decode, encode
from cloudddp.agent.protocol.frozen import frozen
from cloudddp.agent.protocol.jobs import Cause, Failure
from cloudddp.agent.protocol.last_error import last_error
from cloudddp.agent.protocol.progress import PREEMPTED_EXIT_CODE, TrainingStatus
from cloudddp.agent.protocol.sentences import masked, what_failed
from cloudddp.agent.protocol.start import StartRequest

STALLED, NOTICE, DEADLINE, PREEMPTED = "stalled", "notice", "deadline", "preempted"  # besides the phases
ANNOUNCE_SECONDS = 1800.0  # before the deadline
ORDER_SECONDS = 3.0  # for an earlier message to arrive before the verdict
LONGEST, LONGEST_DETAIL = 2000, 300  # characters; Discord takes no more
FAILED = {126: "the command is not executable", 127: "the command was not found on the node"}  # by exit code
TRY_SECONDS, SECONDS = 9.5, 20.0  # for one POST; for a delivery


@frozen
class News:
    """What has happened. `exit_code` is that of the job, once it has ended."""

    event: str
    failure: Optional[Failure] = None
    exit_code: Optional[int] = None


class Notifier:
    """Sends the events of one job, if that was asked for. Created by the guard before it forks."""

    def __init__(self, request: StartRequest) -> None:
        self._request = request
        self._sent: list[subprocess.Popen[bytes]] = []
        self._until = 0.0  # by the monotonic clock; a delivery may wait for a disk, or be stopped
        self._inbox, self._outbox = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)

    def post(self, event: str, failure: Failure) -> None:
        """In the supervisor: let the guard send this."""
        with contextlib.suppress(OSError):  # it has many already, or was killed
            short = replace(failure, detail=failure.detail[:LONGEST])
            self._outbox.send(encode(News(event, short)), socket.MSG_DONTWAIT)

    def take(self) -> None:
        """In the guard: send what the supervisor has passed on."""
        with contextlib.suppress(BlockingIOError):
            while True:
                self._send(decode(self._inbox.recv(MAX_TEXT, socket.MSG_DONTWAIT), News))

    def conclude(self) -> None:
        """Send the verdict, if this node has decided it."""
        self.take()
        found = phases.verdict(store.job_folder(self._request.job))
        if found is None or found.decided_by != self._request.node:
            return
        error = last_error(found.last_lines, found.exit_code).text
        first = found.first and replace(found.first, detail=found.first.detail or error)
        saved = found.exit_code == PREEMPTED_EXIT_CODE
        is_preempted = first.cause is Cause.NOTICE if first else saved
        for one in self._sent:
            with contextlib.suppress(subprocess.TimeoutExpired):
                one.wait(ORDER_SECONDS)
        self._send(News(PREEMPTED if is_preempted else found.phase.value, first, found.exit_code))

    @property
    def runs(self) -> bool:
        return time.monotonic() < self._until and any(one.poll() is None for one in self._sent)

    def _send(self, news: News) -> None:
        if not self._request.watch.notify:
            return
        command = agent_command("notify")
        with contextlib.suppress(OSError):
            child = subprocess.Popen(command, stdin=subprocess.PIPE, cwd="/", start_new_session=True)
            self._sent.append(child)
            self._until = time.monotonic() + SECONDS + ORDER_SECONDS
            if child.stdin is not None:
                with child.stdin as stdin:  # it reads all of it at once
                    stdin.write(encode(self._request) + b"\n" + encode(news))


def payload(
    request: StartRequest, news: News, training: Optional[TrainingStatus], seconds: Optional[float]
) -> dict[str, Any]:
    """Return the message as JSON: `text` is what Slack shows, `content` what Discord shows. `seconds`: since
    the ranks were started, None where they were not. Pure."""
    failure, cluster = news.failure, request.work.env.get("CLOUDDDP_CLUSTER", "")
    # Without its arguments, which may have a token.
    script = " ".join(request.work.script.split()[: 2 if request.work.script.startswith("-m ") else 1])
    script, usd = _clean(request, script)[:LONGEST_DETAIL], None
    text = f"[{news.event}] {script} (job {request.job}) on cluster {cluster}"
    if seconds is not None:
        text += (
            f"{', running for' if news.exit_code is None else ' after'} {timedelta(seconds=round(seconds))}"
        )
        if request.watch.usd_hour:
            usd = round(request.watch.usd_hour * max(seconds, 60.0) / 3600, 2)  # EC2 bills a minute at least
            text += f", at most ${usd:.2f}"
    if failure is not None:
        detail = _clean(request, failure.detail)[:LONGEST_DETAIL]
        text += f": {detail if news.event == DEADLINE else what_failed(failure, detail)}"
    text += f" ({training.progress})" if training and training.progress else ""
    text = re.sub("<(?=[!@#])", "< ", text)[:LONGEST]  # <!channel> and <@user> are mentions in Slack
    return {
        "text": text,
        "content": text,
        "allowed_mentions": {"parse": []},  # of Discord: @everyone in what a rank wrote is text
        "event": news.event,
        "job": request.job,
        "cluster": cluster,
        "script": script,
        "seconds": seconds,
        "usd": usd,
        "node": failure and failure.node,
        "rank": failure and failure.rank,
        "exit_code": news.exit_code,
    }


def _clean(request: StartRequest, text: str) -> str:
    """Return what a program wrote on one line, without what may be secret."""
    return "".join(char if char.isprintable() else " " for char in masked(text, request.secrets))[:LONGEST]


# -- the process of a delivery -------------------------------------------------------------------------------


def main() -> int:
    """Deliver what is on stdin. Why that failed is logged, without the URL and the command."""
    head, _, body = sys.stdin.buffer.read().partition(b"\n")
    request, news = decode(head, StartRequest), decode(body, News)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGCHLD])  # the guard blocks it
    folder = store.job_folder(request.job)
    state = phases.recorded(folder)
    now = time.time() if state is None or state.ended is None else state.ended
    seconds = round(max(now - state.started, 0.0), 1) if state and state.started else None
    message = payload(request, news, rank_records.training_status(folder), seconds)

    def log(why: str) -> None:
        note = _clean(request, f"notification of '{news.event}' was not sent: {why}")
        print(note, file=sys.stderr, flush=True)
        if news.exit_code is not None:  # before the end, a note would pass for a sign of life
            job_record.note(folder, note, ranks=False)

    def give_up() -> None:
        try:
            log(f"it took longer than {SECONDS:.0f} s")
        finally:  # also where the disk is full
            os.killpg(0, signal.SIGKILL)

    limit = threading.Timer(SECONDS, give_up)  # a server may answer byte by byte, and a resolver never
    limit.start()
    is_url = request.watch.notify.startswith(("https://", "http://"))
    why = _post(request.watch.notify, json.dumps(message)) if is_url else _run(request, message)
    limit.cancel()
    if why:
        log(why)
    return 0


def _post(target: str, body: str) -> str:
    """Return why a message was not sent to a URL, or ''. No proxy, no redirect, only the answer's head."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the node may be shutting down
    url, why = urlsplit(target), ""
    path = urlunsplit(("", "", url.path or "/", url.query, ""))
    kind = http.client.HTTPSConnection if url.scheme == "https" else http.client.HTTPConnection
    headers = {"Content-Type": "application/json", "User-Agent": "cloudddp"}
    for pause in (0.0, 1.0):
        time.sleep(pause)
        try:
            connection = kind(url.hostname or "", url.port, timeout=TRY_SECONDS)
            connection.request("POST", path, body, headers)
            status = connection.getresponse().status
            why = "" if status // 100 == 2 else f"{url.hostname}: HTTP {status}"
            if status < 500:
                break
        except (OSError, http.client.HTTPException, ValueError) as error:  # whose text may have the URL
            why = f"{url.hostname}: {getattr(error, 'strerror', '') or type(error).__name__}"
    return why


def _run(request: StartRequest, message: dict[str, Any]) -> str:
    """Return why the command failed, or ''. It is in a variable: the list of processes is public."""
    project, work = store.project_folder(request.project), request.work
    own = {f"CLOUDDDP_{name.upper()}": "" if one is None else str(one) for name, one in message.items()}
    del own["CLOUDDDP_ALLOWED_MENTIONS"]
    env = {**os.environ, **activated(program(work.program, project)), **variables(work, project), **own}
    try:
        done = subprocess.run(
            ["bash", "-lc", 'eval "$CLOUDDDP_NOTIFY"'],
            cwd=project,
            env={**env, "CLOUDDDP_NOTIFY": request.watch.notify},
            check=False,
        )
    except (OSError, ValueError) as error:  # ValueError: a NUL in a variable
        return f"the command could not be started: {type(error).__name__}"
    why = f"the command exited with code {done.returncode}"
    return FAILED.get(done.returncode, why) if done.returncode else ""
