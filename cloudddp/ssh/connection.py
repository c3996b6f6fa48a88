"""One kept SSH connection to one node: strict host key, no Nagle delay, keepalive, a time limit for each wait.

`connect_timeout` bounds reaching and proving the node, `command_timeout` the silence of one command, `total_timeout`
all of it; a node that stops answering in between is found by keepalives within about 45 s. Nothing here retries or
knows other nodes.
"""

from __future__ import annotations

import contextlib
import errno
import socket
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING

from cloudddp.errors import ConnectError, NodeError
from cloudddp.ssh.channel import Background, Signs, at_most, drain, feed
from cloudddp.ssh.order import keep_order

if TYPE_CHECKING:
    import paramiko

KEEPALIVE_SECONDS = 15
DEAD_SECONDS = 45
START_SECONDS = 60.0  # for a server to open a channel and start a command that has no time limit of its own
KEY_PATIENCE = 120.0  # a refused key: cloud-init may still be writing it, or the login user is wrong
MAX_OUTPUT = 4 << 20  # bytes of a command's output that are kept, unless the caller says otherwise


@dataclass(frozen=True, slots=True)
class Target:
    """Where a node answers, and the host keys that it may show, the likeliest first, each `ssh-ed25519 AAAA...`: one,
    or two while its key is being replaced. With none, connecting is refused."""

    label: str
    host: str
    port: int
    user: str
    private_key: Path
    host_keys: tuple[str, ...]

    @property
    def known_as(self) -> str:
        """The node's name in a known_hosts file."""
        return self.host if self.port == 22 else f"[{self.host}]:{self.port}"

    def require_host_key(self) -> None:
        """Raise ConnectError where nothing can prove that a node is the one that it is meant to be."""
        if not self.host_keys:
            raise ConnectError(
                f"{self.label}: no host key is recorded for it, so it cannot prove itself: refused",
                hint="it has the cluster's tags, but this cluster's `up` did not start it: find out who did; "
                "`cloudddp down` ends it with the cluster",
            )


@dataclass(frozen=True, slots=True)
class Result:
    """What a command did. Output is bytes: a node's text need not be UTF-8."""

    exit_code: int
    stdout: bytes
    stderr: bytes


class Connection:
    """An authenticated connection. Thread-safe to close; commands may run side by side on it."""

    def __init__(self, target: Target, host_key: str, client: paramiko.SSHClient) -> None:
        self.target = target
        self.host_key = host_key  # the one that the node has shown
        self._client = client

    @classmethod
    def open(cls, target: Target, *, connect_timeout: float = 10.0) -> Connection:
        """Connect, prove the host key, log in. Raises ConnectError, with patience where a booting node explains it.

        Each attempt accepts one exact key. Where the node shows another one of the target's, there is a second attempt.
        """
        target.require_host_key()
        try:
            return cls._open(target, target.host_keys[0], connect_timeout)
        except ConnectError as error:
            if error.shown not in target.host_keys[1:]:
                raise
            return cls._open(target, error.shown, connect_timeout)

    @classmethod
    def _open(cls, target: Target, host_key: str, connect_timeout: float) -> Connection:
        import paramiko

        _quiet()
        client = paramiko.SSHClient()
        client.set_missing_host_key_policy(paramiko.RejectPolicy())
        kind, blob = host_key.split()[:2]
        client.get_host_keys().add(
            target.known_as, kind, paramiko.PKey.from_type_string(kind, _unbase64(blob))
        )
        try:
            connection = socket.create_connection((target.host, target.port), connect_timeout)
            # paramiko leaves Nagle's algorithm on: 44 ms a command became 2 ms without it.
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if hasattr(socket, "TCP_USER_TIMEOUT"):  # Linux: keepalives that nobody acknowledges end it
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, DEAD_SECONDS * 1000)
            client.connect(
                target.host,
                target.port,
                username=target.user,
                pkey=paramiko.Ed25519Key.from_private_key_file(str(target.private_key)),
                sock=connection,
                timeout=connect_timeout,
                banner_timeout=connect_timeout,
                auth_timeout=connect_timeout,
                allow_agent=False,
                look_for_keys=False,
            )
        except (OSError, EOFError, paramiko.SSHException) as error:
            client.close()
            raise _explain(target, host_key, error) from None
        except BaseException:
            client.close()
            raise
        transport = client.get_transport()
        assert transport is not None  # noqa: S101  connect() succeeded
        transport.set_keepalive(KEEPALIVE_SECONDS)
        keep_order(transport)
        return cls(target, host_key, client)

    def run(
        self,
        command: str,
        *,
        stdin: bytes | Iterable[bytes] = b"",
        command_timeout: float | None = 60.0,
        on_stdout: Callable[[bytes], None] | None = None,
        on_stderr: Callable[[bytes], None] | None = None,
        limit: int = MAX_OUTPUT,
        total_timeout: float | None = None,
    ) -> Result:
        """Run a command to its end and return what it wrote.

        `stdin` may be a stream of pieces, sent while output is read. With `on_stdout` the output goes there as
        it comes and Result.stdout is empty; `on_stderr` likewise. What is kept of either stream is at most `limit`
        bytes: a command that writes more is ended, with NodeError. Raises NodeError also where the connection breaks
        or the time is over; `command_timeout` counts seconds without any sign of the command, in either direction; None
        sets no limit once the server has started the command (a dead node is found by the keepalives all the same).
        `total_timeout` counts all seconds: a node that sends a byte now and then is no better than a silent one where
        an answer is awaited.
        """
        signs = Signs(command_timeout, total_timeout)
        with self._channel(command, signs) as channel:
            # A stream that cannot be read to its end must not leave the command waiting for the rest.
            feeder = Background(lambda: feed(channel, stdin, signs), on_error=channel.close)
            out, err = _Kept(self.target.label, command, limit), _Kept(self.target.label, command, limit)
            # If nobody reads a stream any more, the command must not block on writing to it.
            listener = Background(
                lambda: drain(channel.recv_stderr, on_stderr or err.add, signs), on_error=channel.close
            )
            try:
                drain(channel.recv, on_stdout or out.add, signs)
                listener.join(command_timeout)
                if isinstance(listener.error, (NodeError, TimeoutError)):
                    raise listener.error
                exit_code = self._exit_code(channel, command, command_timeout)
            except TimeoutError:
                raise self._silent(command, signs.verdict()) from None
            for beside in (listener, feeder):
                if beside.error is not None and not isinstance(beside.error, TimeoutError):
                    raise beside.error
        return Result(exit_code, bytes(out.data), bytes(err.data))

    @contextlib.contextmanager
    def _channel(self, command: str, signs: Signs) -> Iterator[paramiko.Channel]:
        import paramiko

        transport = self._client.get_transport()
        patience = START_SECONDS if signs.patience is None else signs.patience
        try:
            if transport is None or not transport.is_active():
                raise EOFError
            channel = transport.open_session(timeout=signs.left(patience))
            channel.settimeout(signs.patience)
            signs.seen()
            with at_most(signs.left(patience), channel):  # paramiko waits for the reply without a limit
                channel.exec_command(command.encode("utf-8", "surrogateescape"))  # a path need not be UTF-8
        except TimeoutError:
            raise self._silent(command, signs.verdict(patience)) from None
        except (OSError, EOFError, paramiko.SSHException) as error:
            if str(error) == "Timeout opening channel." and transport.is_active():
                raise self._silent(command, signs.verdict(patience)) from None
            raise self._broken(command, error) from None
        try:
            yield channel
        except (paramiko.SSHException, EOFError) as error:  # an OSError is the giver's or the taker's
            raise self._broken(command, error) from None
        finally:
            channel.close()

    def _exit_code(self, channel: paramiko.Channel, command: str, timeout: float | None) -> int:
        if not channel.status_event.wait(timeout):
            raise TimeoutError
        if channel.exit_status == -1:  # no exit status: a signal ended it, or the connection is gone
            transport = self._client.get_transport()
            if transport is not None:  # it closes its channels first, and says that it is gone a moment later
                transport.join(0.2)
            if transport is None or not transport.is_active():
                raise self._broken(command, EOFError("connection closed"))
            return 255
        return int(channel.exit_status)

    def _silent(self, command: str, verdict: str) -> NodeError:
        why = f"{self.target.label}: {verdict}"
        return NodeError(
            f"{why} to: {_short(command)}",
            reason=why,
            hint="is the node alive? `cloudddp status` tells; `cloudddp exec -- uptime` tries it",
        )

    def _broken(self, command: str, error: BaseException) -> NodeError:
        reason = f"{self.target.label}: the SSH connection broke ({str(error) or 'connection closed'})"
        return NodeError(
            f"{reason} in: {_short(command)}",
            reason=reason,
            hint="`cloudddp status` tells whether the node still exists",
        )

    @property
    def alive(self) -> bool:
        transport = self._client.get_transport()
        return transport is not None and transport.is_active()

    def close(self) -> None:
        """Close at once; a command that waits in another thread ends with NodeError."""
        self._client.close()


class _Kept:
    """What a command writes to one stream, up to a limit."""

    def __init__(self, label: str, command: str, limit: int) -> None:
        self.data = bytearray()
        self._label, self._command, self._limit = label, command, limit

    def add(self, data: bytes) -> None:
        if len(self.data) + len(data) > self._limit:
            reason = f"{self._label}: its answer is longer than {self._limit >> 20} MiB and was cut off"
            raise NodeError(f"{reason}: {_short(self._command)}", reason=reason)
        self.data += data


def _quiet() -> None:
    """Keep paramiko's threads from printing tracebacks: what they log is in the error that we raise."""
    import logging

    log = logging.getLogger("paramiko")
    if not log.handlers:
        log.addHandler(logging.NullHandler())


def _unbase64(text: str) -> bytes:
    import base64

    return base64.b64decode(text)


def _short(command: str) -> str:
    line = command.strip().splitlines()[0] if command.strip() else ""
    return line if len(line) <= 100 else line[:97] + "..."


def _explain(target: Target, host_key: str, error: BaseException) -> ConnectError:
    """Return what a failed connection means to a user, and whether waiting may help."""
    import paramiko

    where = f"{target.label} at {target.host} port {target.port}"
    if isinstance(error, paramiko.BadHostKeyException):
        return ConnectError(
            f"{where}: its host key is not the one recorded for this node: refused "
            f"(expected {host_key.split()[1][-16:]}, got {error.key.get_base64()[-16:]})",
            hint="something else answers at that address; run `cloudddp status`, and do not log in by hand",
            shown=f"{error.key.get_name()} {error.key.get_base64()}",
        )
    if isinstance(error, paramiko.AuthenticationException):
        return ConnectError(
            f"{where}: the cluster's key is refused for user {target.user!r}",
            hint="is cluster.user the login user of the image (ubuntu, ec2-user)?",
            patience=KEY_PATIENCE,
        )
    if isinstance(error, paramiko.SSHException) and "not found in known_hosts" in str(error):
        return ConnectError(
            f"{where}: it shows no {host_key.split()[0]} host key, so it cannot prove itself: refused",
            hint="did cloud-init run on the image? look at the instance's system log in the AWS console",
        )
    if isinstance(error, ConnectionRefusedError):
        return ConnectError(
            f"{where}: connection refused",
            hint="its SSH is not up: it still boots, or has failed; `cloudddp status` tells its state",
            patience=inf,
        )
    if isinstance(error, TimeoutError) or getattr(error, "errno", None) in (
        errno.EHOSTUNREACH,
        errno.ENETUNREACH,
    ):
        return ConnectError(
            f"{where}: no answer",
            hint="security group, route or your own network: did your address change? `cloudddp allow-me`",
            patience=inf,
        )
    if "banner" in str(error) or "No existing session" in str(error):
        return ConnectError(
            f"{where}: it takes connections, but does not speak SSH",
            hint="it still boots, or it hangs; `cloudddp status` tells its state, `cloudddp down` ends it",
            patience=inf,
        )
    if isinstance(error, paramiko.PasswordRequiredException):
        return ConnectError(f"{target.private_key}: needs a passphrase, which cloudddp's own keys never have")
    return ConnectError(f"{where}: {error or type(error).__name__}", patience=inf)
