"""Where AWS credentials come from, as stand-ins: a user's ~/.aws, an HTTP server for SSO, `aws login` and
containers, and a controlling terminal to type MFA codes on."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import pty
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

from support.harness import TIMEOUT, CommandLine
from support.processes import zygote
from support.web import Handler, Server

KEYS_OF_THE_ENVIRONMENT = tuple(
    f"AWS_{name}" for name in ("ACCESS_KEY_ID", "SECRET_ACCESS_KEY", "CONFIG_FILE", "SHARED_CREDENTIALS_FILE")
)
STREAMS: dict[str, Any] = dict.fromkeys(("stdout", "stderr"), subprocess.PIPE)
STREAMS |= {"stdin": subprocess.DEVNULL, "text": True}

SECRET = "aSecretOfFortyCharacters/0123456789+ABCD"


def iso(**ahead: float) -> str:
    """Return a time from now on, as AWS's tools write it."""
    return f"{datetime.now(UTC) + timedelta(**ahead):%Y-%m-%dT%H:%M:%SZ}"


@dataclass
class Done:
    code: int
    out: str
    err: str
    screen: str = ""


@dataclass
class User:
    """A user of the command line with a home folder, and no credentials in the environment. The fixture `cli`
    keeps its own, with which it removes the cluster."""

    cli: CommandLine
    home: Path
    cold: bool = False  # for tokens of SSO: botocore computes where they are when it is imported

    def __post_init__(self) -> None:
        self.cli = replace(self.cli, env=dict(self.cli.env))
        for name in KEYS_OF_THE_ENVIRONMENT:
            self.cli.env.pop(name, None)
        self.cli.env["HOME"] = str(self.home)

    def config(self, text: str) -> None:
        self._write("config", text)

    def credentials(self, text: str) -> None:
        self._write("credentials", text)

    def _write(self, name: str, text: str) -> None:
        path = self.home / ".aws" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def token(self, folder: str, key: str, digest: str = "sha1", **content: Any) -> Path:
        """Write the token of a session as the AWS CLI does after `aws sso login` or `aws login`."""
        path = self.home / ".aws" / folder / "cache" / f"{hashlib.new(digest, key.encode()).hexdigest()}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(content))
        return path

    @property
    def cache(self) -> list[Path]:
        """The files of the AWS CLI's cache of credentials."""
        return sorted((self.home / ".aws/cli/cache").glob("*"))

    def start(self, *words: str, **env: str) -> Any:
        """Start a command without a terminal."""
        own = {**self.cli.env, **env}
        argv = ("-m", "cloudddp", *words)
        if self.cold:
            process: Any = subprocess.Popen(
                [sys.executable, *argv], cwd=self.cli.cwd, env=own, start_new_session=True, **STREAMS
            )
        else:
            process = zygote().start(argv, self.cli.cwd, own, session=True)
        self.cli.started.append(process)
        return process

    def run(self, *words: str, **env: str) -> Done:
        """Run a command without a terminal."""
        process = self.start(*words, **env)
        out, err = process.communicate(timeout=TIMEOUT)
        return Done(process.returncode, out, err)

    def works(self, *words: str, **env: str) -> str:
        """Require that a command (or `ls`) succeeds, and return its stdout."""
        done = self.run(*(words or ("ls",)), **env)
        assert done.code == 0, done.err
        return done.out

    def refused(self, message: str, hint: str, *words: str, code: int = 1, **env: str) -> None:
        """Require that a command (or `ls`) fails with this message and hint, and prints no secret."""
        done = self.run(*(words or ("ls",)), **env)
        assert done.code == code, done
        assert message in done.err
        assert hint in done.err.replace(message, "")
        found = [text for text in (SECRET, "Traceback", "a bug in cloudddp") if text in done.out + done.err]
        assert found == [], done.err

    @contextlib.contextmanager
    def terminal(self, *words: str, **env: str) -> Iterator[Tty]:
        """Run a command with a controlling terminal, and with stdout and stderr elsewhere."""
        ours, theirs = pty.openpty()

        def control() -> None:
            # A shell that runs the tests in the background has Ctrl-C ignored, and that is inherited.
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.setsid()
            fcntl.ioctl(theirs, termios.TIOCSCTTY, 0)

        process = subprocess.Popen(
            [sys.executable, "-m", "cloudddp", *words],
            cwd=self.cli.cwd,
            env={**self.cli.env, **env},
            preexec_fn=control,
            pass_fds=[theirs],
            **STREAMS,
        )
        self.cli.started.append(process)
        os.close(theirs)
        tty = Tty(ours, process)
        try:
            yield tty
        finally:
            if process.poll() is None:
                process.kill()
                process.communicate()
            os.close(ours)


@dataclass
class Tty:
    """What a command writes to its terminal, and what is typed there."""

    handle: int
    process: subprocess.Popen[str]
    screen: str = ""

    def answer(self, question: str, text: str) -> None:
        """Wait for a new question, and type a line."""
        seen = len(self.screen)
        while question not in self.screen[seen:]:
            self.screen += os.read(self.handle, 1000).decode()
        while termios.tcgetattr(self.handle)[3] & termios.ECHO:
            time.sleep(0.01)  # the question comes just before or after the echo is switched off
        os.write(self.handle, f"{text}\n".encode())

    def end(self) -> Done:
        out, err = self.process.communicate(timeout=TIMEOUT)
        os.set_blocking(self.handle, False)
        with contextlib.suppress(OSError):  # all was read, or the terminal is closed
            self.screen += os.read(self.handle, 10000).decode()
        return Done(self.process.returncode, out, err, self.screen)


@dataclass
class Reply:
    body: Any
    status: int = 200
    kind: str = ""  # the error type, in a header


@dataclass
class Identity:
    """An HTTP server with a reply for each path; it keeps the requests."""

    replies: dict[str, Reply] = field(default_factory=dict)
    requests: list[tuple[str, Mapping[str, str], Any]] = field(default_factory=list)
    url: str = ""

    def paths(self) -> list[str]:
        return [path.partition("?")[0] for path, _, _ in self.requests]


@contextlib.contextmanager
def identity_server() -> Iterator[Identity]:
    identity = Identity()

    class Answers(Handler, BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._serve()

        def do_POST(self) -> None:
            self._serve()

        def _serve(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            identity.requests.append((self.path, dict(self.headers), json.loads(body) if body else None))
            reply = identity.replies.get(self.path.partition("?")[0], Reply({"message": "not found"}, 404))
            data = reply.body.encode() if isinstance(reply.body, str) else json.dumps(reply.body).encode()
            kind = {"x-amzn-ErrorType": reply.kind} if reply.kind else {}
            self.answer(reply.status, data, Content_Type="application/json", **kind)

    with contextlib.closing(Server(Answers)) as server:
        identity.url = f"http://{server.address}"
        yield identity
