"""One kept SSH connection to one node: strict host key, no Nagle delay, keepalive, two separate timeouts.

`connect_timeout` bounds reaching and proving the node, `command_timeout` one command; a node that stops
answering in between is found by keepalives within about 45 s. Nothing here retries or knows other nodes.
"""

from __future__ import annotations

import contextlib
import errno
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cloudddp.errors import ConnectError, NodeError

if TYPE_CHECKING:
    import paramiko

KEEPALIVE_SECONDS = 15
DEAD_SECONDS = 45
KEY_PATIENCE = 120.0  # a refused key: cloud-init may still be writing it, or the login user is wrong
CHUNK = 128 * 1024  # larger writes were slower (0.82 s against 1.30 s for 200 MB)
ABOUT_A_CHANNEL = range(93, 99)  # RFC 4254: window adjust, data, extended data, EOF, CLOSE, request
CLOSE = 97


@dataclass(frozen=True, slots=True)
class Target:
    """Where a node answers and how it proves itself. `host_key` is `ssh-ed25519 AAAA...`."""

    label: str
    host: str
    port: int
    user: str
    private_key: Path
    host_key: str


@dataclass(frozen=True, slots=True)
class Result:
    """What a command did. Output is bytes: a node's text need not be UTF-8."""

    exit_code: int
    stdout: bytes
    stderr: bytes


class Connection:
    """An authenticated connection. Thread-safe to close; commands may run side by side on it."""

    def __init__(self, target: Target, client: paramiko.SSHClient) -> None:
        self.target = target
        self._client = client
        self._order = _Order(client)

    @classmethod
    def open(cls, target: Target, *, connect_timeout: float = 10.0) -> Connection:
        """Connect, prove the host key, log in. Raises ConnectError, with patience where a booting node explains it."""
        import paramiko

        _quiet()
        client = paramiko.SSHClient()
        client.set_missing_host_key_policy(paramiko.RejectPolicy())
        kind, blob = target.host_key.split()[:2]
        name = target.host if target.port == 22 else f"[{target.host}]:{target.port}"
        client.get_host_keys().add(name, kind, paramiko.PKey.from_type_string(kind, _unbase64(blob)))
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
            raise _explain(target, error) from None
        except BaseException:
            client.close()
            raise
        transport = client.get_transport()
        assert transport is not None  # noqa: S101  connect() succeeded
        transport.set_keepalive(KEEPALIVE_SECONDS)
        return cls(target, client)

    def run(
        self,
        command: str,
        *,
        stdin: bytes | Iterable[bytes] = b"",
        command_timeout: float | None = 60.0,
        on_stdout: Callable[[bytes], None] | None = None,
    ) -> Result:
        """Run a command to its end and return what it wrote.

        `stdin` may be a stream of pieces, sent while output is read. With `on_stdout` the output goes there as
        it comes and Result.stdout is empty. Raises NodeError where the connection breaks or the time is over;
        `command_timeout` counts seconds without any sign of the command, in either direction; None waits for ever
        (a dead node is found by the keepalives all the same).
        """
        with self._channel(command, command_timeout) as channel:
            signs = _Signs(command_timeout)
            # A stream that cannot be read to its end must not leave the command waiting for the rest.
            feeder = _Background(lambda: _feed(channel, stdin, signs), on_error=channel.close)
            errors: list[bytes] = []
            listener = _Background(lambda: _drain(channel.recv_stderr, errors.append, signs))
            collected: list[bytes] = []
            try:
                _drain(channel.recv, on_stdout or collected.append, signs)
                listener.join(command_timeout)
                exit_code = self._exit_code(channel, command, command_timeout)
            except TimeoutError:
                why = f"{self.target.label}: no answer for {command_timeout:g} s"
                raise NodeError(
                    f"{why} to: {_short(command)}",
                    reason=why,
                    hint="is the node alive? `cloudddp status` tells; `cloudddp exec -- uptime` tries it",
                ) from None
            if feeder.error is not None:
                raise feeder.error
        return Result(exit_code, b"".join(collected), b"".join(errors))

    @contextlib.contextmanager
    def _channel(self, command: str, timeout: float | None) -> Iterator[paramiko.Channel]:
        import paramiko

        transport = self._client.get_transport()
        try:
            if transport is None or not transport.is_active():
                raise EOFError
            channel = transport.open_session(timeout=timeout)
            self._order.opened(channel)
            channel.settimeout(timeout)
            channel.exec_command(command)
        except (OSError, EOFError, paramiko.SSHException) as error:
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


class _Order:
    """Nothing is sent on a channel after its CLOSE, for which a server ends the whole connection.

    paramiko decides to send (data, a wider window) under the channel's lock and sends after letting go of it, so
    its own thread can answer the server's CLOSE in between. Every packet passes here one at a time, in its final
    order (paramiko holds `clear_to_send_lock`); what comes too late is dropped, as RFC 4254 section 5.3 has it.
    """

    def __init__(self, client: paramiko.SSHClient) -> None:
        self._closed: set[bytes] = set()
        transport = client.get_transport()
        assert transport is not None  # noqa: S101  the client is connected
        self._send = transport.packetizer.send_message
        transport.packetizer.send_message = self._in_order

    def opened(self, channel: paramiko.Channel) -> None:
        """The server may give the number of a closed channel to a new one."""
        self._closed.discard(channel.remote_chanid.to_bytes(4, "big"))

    def _in_order(self, message: paramiko.Message) -> None:
        packet = message.asbytes()
        if packet[0] in ABOUT_A_CHANNEL:
            channel = packet[1:5]
            if channel in self._closed:
                return
            if packet[0] == CLOSE:
                self._closed.add(channel)
        self._send(message)


class _Background:
    """A daemon thread that keeps what went wrong: never joined without a limit, so Ctrl-C is not held up."""

    def __init__(self, work: Callable[[], None], *, on_error: Callable[[], None] = lambda: None) -> None:
        self.error: BaseException | None = None
        self._work = work
        self._on_error = on_error
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._work()
        except BaseException as error:
            self.error = error
            self._on_error()

    def join(self, timeout: float | None) -> None:
        self._thread.join(timeout)


class _Signs:
    """When a command was last seen to be alive: it took or gave a byte."""

    def __init__(self, patience: float | None) -> None:
        self.patience = patience
        self.last = time.monotonic()

    def seen(self) -> None:
        self.last = time.monotonic()

    @property
    def none(self) -> bool:
        return self.patience is not None and time.monotonic() - self.last >= self.patience


def _feed(channel: paramiko.Channel, stdin: bytes | Iterable[bytes], signs: _Signs) -> None:
    pieces = [stdin] if isinstance(stdin, bytes) else stdin
    try:
        for piece in pieces:
            for start in range(0, len(piece), CHUNK):
                channel.sendall(piece[start : start + CHUNK])
                signs.seen()
        channel.shutdown_write()
    except OSError as error:
        if error.errno in (None, errno.EPIPE) or isinstance(error, TimeoutError):
            return  # the command ended without reading all: its exit code says more
        raise


def _drain(receive: Callable[[int], bytes], keep: Callable[[bytes], Any], signs: _Signs) -> None:
    """Receive to the end. Silence on one stream is no sign of death while another one moves."""
    while True:
        try:
            data = receive(CHUNK)
        except TimeoutError:
            if signs.none:
                raise
            continue
        if not data:
            return
        signs.seen()
        keep(data)


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


def _explain(target: Target, error: BaseException) -> ConnectError:
    """Return what a failed connection means to a user, and whether waiting may help."""
    import paramiko

    where = f"{target.label} at {target.host} port {target.port}"
    if isinstance(error, paramiko.BadHostKeyException):
        return ConnectError(
            f"{where}: its host key is not the one made for this cluster: refused "
            f"(expected {target.host_key.split()[1][-16:]}, got {error.key.get_base64()[-16:]})",
            hint="something else answers at that address; run `cloudddp status`, and do not log in by hand",
        )
    if isinstance(error, paramiko.AuthenticationException):
        return ConnectError(
            f"{where}: the cluster's key is refused for user {target.user!r}",
            hint="is cluster.user the login user of the image (ubuntu, ec2-user)?",
            patience=KEY_PATIENCE,
        )
    if isinstance(error, paramiko.SSHException) and "not found in known_hosts" in str(error):
        return ConnectError(
            f"{where}: it shows no {target.host_key.split()[0]} host key, so it cannot prove itself: refused",
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
