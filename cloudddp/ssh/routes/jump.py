"""A jump host: OpenSSH's `ssh -W` per node, whose stdin and stdout are the stream to the node's SSH server.

ssh reads the user's ~/.ssh/config, agent, keys and known_hosts. The jump host's key must be known, and is
never added. The nodes' host keys are checked end to end, so the jump host can end a connection, but not read
it.
"""

from __future__ import annotations

import contextlib
import functools
import os
import pwd
import re
import shlex
import shutil
import subprocess
import threading
import time
from dataclasses import dataclass
from math import inf
from pathlib import Path

from cloudddp.config import timing
from cloudddp.config.timing import Timing
from cloudddp.errors import ConnectError, UsageError, q
from cloudddp.ssh.routes.command import ProcessStream
from cloudddp.ssh.target import EARLY_CLOSE, EARLY_CLOSE_HINT, NodeSocket, Target, known_hosts_name
from cloudddp.text import one_line

_GIVEN = re.compile(
    r"(?:(?P<user>[^@-][^@]*)@)?(?P<host>\[[^\[\]\s-][^\[\]\s]*\]|[^@:\[\]\s-][^@:\[\]\s]*)(?::(?P<port>\d+))?"
)
_KNOWN_HOSTS = "~/.ssh/known_hosts"
_DEFAULT_KEYS = ("id_ed25519", "id_ecdsa", "id_rsa")
_SELF = "[127.0.0.1]:22"  # of the jump host: forwarded to find out whether the user can log in
_SETTINGS_SECONDS = 30.0  # for `ssh -G`, which may run the commands of `Match exec`
# ssh processes that log in at a time: sshd drops connections if more than 10 do (MaxStartups).
_LOGGING_IN = threading.BoundedSemaphore(8)

# What ssh writes to stderr, and the kind of failure that it means: the first one that is found counts.
_PHRASES = (
    ("REVOKED HOST KEY", "revoked"),
    ("HOST IDENTIFICATION HAS CHANGED", "changed"),
    ("Host key verification failed", "unknown"),
    ("Permission denied (", "login"),
    ("Too many authentication failures", "login"),
    ("administratively prohibited", "forbidden"),
    ("open failed: ", "node"),
    ("exchange_identification: ", "early close"),
    ("Connection refused", "refused"),
    ("timed out", "silent"),
)
_AFTER_LOGIN = ("forbidden", "node")


def failure_in(errors: str) -> tuple[str, str]:
    """Return the kind of failure that ssh has written about, '' for any other, and the line about it, safe to
    print."""
    lines = [line.strip() for line in errors.splitlines() if line.strip()]
    for phrase, kind in _PHRASES:
        for line in lines:
            if phrase in line:
                return kind, one_line(line, 200)
    return "", one_line(lines[-1], 200) if lines else ""


def split(given: str) -> tuple[str, str, int | None]:
    """Return user ('' if not given), host and port (None if not given) of `[user@]host[:port]`. Raises
    UsageError, also for what ssh would take for an option."""
    found = _GIVEN.fullmatch(given)
    if found is None:
        raise UsageError(
            f"cluster.proxy_jump: not a jump host: {one_line(given, 100)!r}", hint="give [user@]host[:port]"
        )
    return found["user"] or "", found["host"].strip("[]"), int(found["port"]) if found["port"] else None


@dataclass(frozen=True, slots=True)
class JumpHost:
    """What ssh connects to, with the user's configuration."""

    host: str
    port: int
    user: str

    @property
    def where(self) -> str:
        return f"jump host {one_line(self.user, 64)}@{one_line(self.host, 253)} port {self.port}"


class Jump:
    """A route through `[user@]host[:port]`."""

    def __init__(self, given: str) -> None:
        self.silent_hint = (
            "does the jump host reach the node's subnet, and does the security group of the nodes admit it? "
            "`cloudddp allow-me` admits its present address"
        )
        self._given = given
        user, host, port = split(given)
        # The words after `ssh` that log in to it.
        self._login = (*(("-p", str(port)) if port else ()), f"{user}@{host}" if user else host)

    @functools.cached_property
    def host(self) -> JumpHost:
        """What ssh makes of it. Raises UsageError."""
        return _resolved(self._given, [_program(), *_files(), "-G", *self._login])

    def open(self, target: Target, timeout: float, limits: Timing) -> NodeSocket:
        words = self._limited_command(f"[{target.host}]:{target.port}", timeout, limits)
        _LOGGING_IN.acquire()
        try:
            return ProcessStream(words, {}, limits.dead, on_start=_LOGGING_IN.release)
        except BaseException:
            _LOGGING_IN.release()
            raise

    def check(self, timeout: float) -> None:
        """Log in to the jump host. Raises ConnectError, UsageError."""
        host, limits, deadline = self.host, timing.current(), time.monotonic() + timeout
        with contextlib.closing(
            ProcessStream(self._limited_command(_SELF, timeout, limits), {}, limits.dead)
        ) as stream:
            answer = b""
            while not (answer or stream.has_ended):
                if time.monotonic() > deadline:
                    hint = f"does {self._login_command} work?"
                    raise ConnectError(f"{host.where}: no answer", hint=hint, patience=inf)
                with contextlib.suppress(OSError):
                    answer = stream.recv(1)
        if not answer and failure_in(stream.errors())[0] not in _AFTER_LOGIN:
            raise self._failure(stream.errors())

    def explain(self, target: Target, stream: NodeSocket) -> ConnectError | None:
        assert isinstance(stream, ProcessStream)  # noqa: S101
        if stream.speaks_ssh:
            return None
        code, errors = stream.exit_code(), stream.errors()
        kind, line = failure_in(errors)
        if kind == "node":
            reason = line.partition("open failed: ")[2]
            return ConnectError(
                f"{target.where}: the {self.host.where} cannot connect to it ({reason})",
                hint=self.silent_hint,
                patience=inf,
            )
        if kind or code:
            return self._failure(errors)
        if code is None and not stream.greeting():
            return ConnectError(
                f"{target.where}: no answer", hint=self.silent_hint, patience=inf, silent=True
            )
        return None  # the node has ended the connection, or does not speak SSH

    def openssh_options(self, target: Target) -> list[str]:
        words = self._command(f"[{target.host}]:{target.port}")
        return [f"ProxyCommand={shlex.join(words).replace('%', '%%')}"]

    def _limited_command(self, to: str, timeout: float, limits: Timing) -> list[str]:
        return self._command(
            to,
            "BatchMode=yes",
            "LogLevel=INFO",
            f"ConnectTimeout={max(int(timeout) - 1, 1)}",  # before ours, since ssh knows why
            f"ServerAliveInterval={max(round(limits.keepalive), 1)}",
            f"ServerAliveCountMax={max(round(limits.dead / limits.keepalive), 1)}",
        )

    def _command(self, to: str, *settings: str) -> list[str]:
        """Return the command that connects its input and output to the address `to`."""
        options = [word for setting in (*settings, *_SETTINGS) for word in ("-o", setting)]
        return [_program(), *options, *_files(), "-W", to, *self._login]

    @property
    def _login_command(self) -> str:
        return f"`ssh {q(*self._login)}`"

    def _failure(self, errors: str) -> ConnectError:
        """Return what ssh has written as an error of the jump host, with patience if waiting may help."""
        host, login = self.host, self._login_command
        kind, line = failure_in(errors)
        known_as = shlex.quote(known_hosts_name(host.host, host.port))
        lasting = {
            "unknown": (
                f"its host key is not in {_KNOWN_HOSTS}, so it cannot be verified: refused",
                f"log in once, compare the fingerprint, and accept it: {login}",
            ),
            "changed": (
                f"its host key is not the one in {_KNOWN_HOSTS}: refused",
                f"if the jump host was replaced: `ssh-keygen -R {known_as}`, then {login}",
            ),
            "revoked": (f"its host key is revoked in {_KNOWN_HOSTS}: refused", ""),
            "login": (
                f"it accepts none of your keys ({line})",
                f"does {login} log in without asking? add your key to the agent with `ssh-add`",
            ),
            "forbidden": (
                f"it does not forward connections ({line})",
                "AllowTcpForwarding and PermitOpen in its sshd_config must allow the nodes",
            ),
        }
        passing = {
            "early close": (EARLY_CLOSE, EARLY_CLOSE_HINT),
            "refused": ("connection refused", f"does {login} work?"),
            "silent": ("no answer", f"does {login} work?"),
        }
        other = (line.rpartition(": ")[2] or "ssh has ended", f"does {login} work?")
        what, hint = lasting.get(kind) or passing.get(kind, other)
        return ConnectError(f"{host.where}: {what}", hint=hint, patience=0.0 if kind in lasting else inf)


# ControlMaster: a connection that the user keeps may be shared, but none is left behind.
_SETTINGS = ("StrictHostKeyChecking=yes", "ClearAllForwardings=yes", "ControlMaster=no")


def _program() -> str:
    program = shutil.which("ssh")
    if program is None:
        raise UsageError(
            "cluster.proxy_jump needs OpenSSH's `ssh`, which is not installed: install openssh-client"
        )
    return program


def _resolved(given: str, words: list[str]) -> JumpHost:
    """Return the jump host that `ssh -G` names. Raises UsageError."""
    _, asked, _ = split(given)
    try:
        found = subprocess.run(
            words, stdin=subprocess.DEVNULL, capture_output=True, timeout=_SETTINGS_SECONDS, check=False
        )
        errors = found.stderr.decode(errors="replace") if found.returncode else ""
    except subprocess.TimeoutExpired:
        errors = f"no answer for {_SETTINGS_SECONDS:g} s"
    if errors:
        raise UsageError(
            f"ssh cannot read the settings of the jump host {one_line(asked, 100)}: {failure_in(errors)[1]}",
            hint="correct ~/.ssh/config",
        )
    lines = (line.partition(" ") for line in found.stdout.decode(errors="replace").splitlines())
    settings = {name: value for name, _, value in lines}
    name = settings.get("hostname", asked)
    if not _is_host_name(name):
        in_config = name != asked
        where = f"HostName of {one_line(asked, 100)} in ~/.ssh/config" if in_config else "cluster.proxy_jump"
        raise UsageError(
            f"{where}: {one_line(name, 100)!r} is not a host name",
            hint="give a DNS name, whose parts have 1 to 63 characters each, or an address",
        )
    return JumpHost(name, int(settings.get("port", "22")), settings.get("user", ""))


def _is_host_name(name: str) -> bool:
    """Return whether the name can be looked up: Python encodes it as IDNA for that."""
    try:
        name.encode("idna")
    except UnicodeError:
        return False
    return one_line(name) == name


def _files() -> list[str]:
    """Return the options of `ssh` for the user's files, where they are not its own defaults.

    OpenSSH looks in the home folder of the user database, this program in HOME.
    """
    folder = Path("~/.ssh").expanduser()
    with contextlib.suppress(KeyError):  # no entry for this user
        if folder.parent == Path(pwd.getpwuid(os.getuid()).pw_dir):
            return []
    config = folder / "config"
    found = ["-F", str(config) if config.is_file() else "none"]
    found += ["-o", f"UserKnownHostsFile={folder / 'known_hosts'}"]
    for name in _DEFAULT_KEYS:
        if (folder / name).is_file():
            found += ["-i", str(folder / name)]
    return found
