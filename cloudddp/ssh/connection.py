"""One SSH connection to one node: strict host key, no Nagle delay, keepalives, a time limit for each wait.

`connect_timeout` limits connecting and authenticating; the limits of a command are in its CommandSpec. If a
node stops answering, keepalives end the connection after Timing.dead seconds. Nothing here retries, or
depends on other nodes.
"""

from __future__ import annotations

import base64
import contextlib
import errno
import logging
from math import inf
from typing import TYPE_CHECKING

from cloudddp import timings
from cloudddp.config import timing
from cloudddp.config.timing import Timing
from cloudddp.errors import CloudDDPError, ConnectError
from cloudddp.ssh.running import MAX_PACKET, BoundedBuffer, CommandSpec, Input, Result, RunningCommand
from cloudddp.ssh.target import EARLY_CLOSE_HINT, Stream, Target, early_close_in
from cloudddp.ssh.time_limits import Activity
from cloudddp.text import one_line, reason_of

if TYPE_CHECKING:
    import paramiko

# Bytes that a server may send before the first of them is acknowledged: so many per round trip. paramiko's
# default of 2 MiB is 17 MB/s at 100 ms, 16 MiB is 71 MB/s.
DEFAULT_WINDOW, STREAM_WINDOW = 2 << 20, 16 << 20
# Bytes per second that a stream may reach. A window for more only fills the queues on the way, whose losses
# slow it down: 16 MiB at 20 ms and 500 Mbit/s give 37 MB/s, 4 MiB 49, 2 MiB 57.
FASTEST = 160_000_000

LOOPBACK = "127.0.0.1"


def silence_log() -> None:
    """Prevent paramiko's threads from printing tracebacks: the error that we raise contains what they log."""
    log = logging.getLogger("paramiko")
    if not log.handlers:
        log.addHandler(logging.NullHandler())


class Connection:
    """An authenticated connection. Thread-safe to close; several commands may run at the same time."""

    def __init__(
        self, target: Target, host_key: str, client: paramiko.SSHClient, limits: Timing, window: int
    ) -> None:
        self.target = target
        self.host_key = host_key  # the one that the node has presented
        self.kept: dict[type, object] = {}  # what its user keeps for as long as it lasts, by type
        self._client = client
        self._limits = limits
        self._window = window

    @classmethod
    def open(
        cls, target: Target, *, connect_timeout: float | None = None, window: int = STREAM_WINDOW
    ) -> Connection:
        """Connect, verify the host key, log in. Raises ConnectError, with patience if the node may still be
        booting.

        Each attempt accepts exactly one key. If the node presents another key of the target, there is a
        second attempt. `window`: how many bytes of a stream may be in memory if its receiver is slower than
        the node.
        """
        target.require_host_key()
        limit = timing.current().connect if connect_timeout is None else connect_timeout
        try:
            return cls._open(target, target.host_keys[0], limit, window)
        except ConnectError as error:
            if error.shown not in target.host_keys[1:]:
                raise
            return cls._open(target, error.shown, limit, window)

    @classmethod
    def _open(cls, target: Target, host_key: str, connect_timeout: float, window: int) -> Connection:
        with timings.span("imports: paramiko"):
            import paramiko  # 0.2 s, which commands without SSH do not need; likewise below

        from cloudddp.ssh.transport import make_transport

        silence_log()
        limits = timing.current()
        client = paramiko.SSHClient()
        client.set_missing_host_key_policy(paramiko.RejectPolicy())
        kind, blob = host_key.split()[:2]
        key = paramiko.PKey.from_type_string(kind, base64.b64decode(blob))
        client.get_host_keys().add(target.known_as, kind, key)
        login_key = _login_key(target)
        stream = None
        try:
            stream = target.route.open(target, connect_timeout, limits)
            client.connect(
                target.host,
                target.port,
                username=target.user,
                pkey=login_key,
                sock=stream,
                timeout=connect_timeout,
                banner_timeout=connect_timeout,
                auth_timeout=connect_timeout,
                allow_agent=False,
                look_for_keys=False,
                transport_factory=make_transport,
            )
        except CloudDDPError:  # of the route
            raise
        except Exception as error:  # of any type, if a packet was invalid
            cause = target.route.explain(target, stream) if _is_end(error) else None
            _close(client, stream)
            raise cause or _explain(target, host_key, error) from None
        except BaseException:
            _close(client, stream)
            raise
        transport = client.get_transport()
        assert transport is not None  # noqa: S101  connect() succeeded
        transport.set_keepalive(limits.keepalive)
        return cls(target, host_key, client, limits, window)

    def run(self, spec: CommandSpec) -> Result:
        """Run a command to its end and return its result.

        Raises NodeError also if the connection breaks or a time limit passes.
        """
        label = self.target.label
        out, err = (BoundedBuffer(label, spec.limit) for _ in range(2))
        receivers = spec.on_stdout or out.add, spec.on_stderr or err.add
        activity = Activity(spec.command_timeout, spec.total_timeout)
        with contextlib.closing(
            self.start(
                spec.command, activity, is_stream=spec.on_stdout is not None, until_exit=spec.until_exit
            )
        ) as running:
            code = running.exchange(Input(spec.stdin), receivers, activity)
        return Result(255 if code is None else code, bytes(out.data), bytes(err.data))

    def start(
        self, command: str, activity: Activity, *, is_stream: bool = True, until_exit: bool = False
    ) -> RunningCommand:
        """Start a command. `is_stream`: its output is passed on as it arrives. Raises NodeError."""
        return RunningCommand(
            self.target.label,
            self._client.get_transport(),
            command,
            activity,
            self._limits,
            window=self._stream_window() if is_stream else DEFAULT_WINDOW,
            until_exit=until_exit,
        )

    def _stream_window(self) -> int:
        """Return the window of a stream: the more, the longer the round trip is; the most where that is not
        known."""
        transport = self._client.get_transport()
        seconds = None if transport is None else transport.sock.round_trip()
        if seconds is None:
            return self._window
        return min(self._window, max(DEFAULT_WINDOW, int(seconds * FASTEST)))

    def open_port(self, port: int) -> paramiko.Channel:
        """Return a channel to a port of the node's loopback. Raises OSError if nothing listens there, or the
        connection is closed."""
        import paramiko

        transport = self._client.get_transport()
        try:
            if transport is None:
                raise EOFError
            ends = (LOOPBACK, port), (LOOPBACK, 0)
            return transport.open_channel(
                "direct-tcpip", *ends, DEFAULT_WINDOW, MAX_PACKET, timeout=self._limits.start
            )
        except (paramiko.SSHException, EOFError) as error:
            raise OSError(one_line(getattr(error, "text", "") or reason_of(error), 200)) from None

    @property
    def is_open(self) -> bool:
        """Whether it has not broken, and was not closed."""
        transport = self._client.get_transport()
        return transport is not None and transport.is_active()

    def close(self) -> None:
        """Close the connection; a command that waits in another thread ends with NodeError."""
        self._client.close()


def _login_key(target: Target) -> paramiko.PKey:
    """Return the private login key. Raises ConnectError, without patience: no node can be reached without
    it."""
    import paramiko

    try:
        return paramiko.Ed25519Key.from_private_key_file(str(target.private_key))
    except paramiko.PasswordRequiredException:
        why = "needs a passphrase, which cloudddp's own keys never have"
    except (OSError, ValueError, paramiko.SSHException) as error:
        why = f"cannot read the cluster's private key: {reason_of(error)}"
    raise ConnectError(
        f"{target.private_key}: {why}",
        hint="restore the file; without it the nodes cannot be used: `cloudddp down` stops the bill",
    )


def _is_end(error: BaseException) -> bool:
    """Return whether the stream has ended or is silent, and not the server refused something."""
    import paramiko

    return not isinstance(error, (paramiko.BadHostKeyException, paramiko.AuthenticationException)) and (
        "not found in known_hosts" not in str(error)
    )


def _close(client: paramiko.SSHClient, stream: Stream | None) -> None:
    client.close()
    if stream is not None:  # which the client closes only if it has begun to use it
        stream.close()


def _closed_by_server(error: paramiko.AuthenticationException) -> bool:
    """Return whether the server has closed the connection instead of refusing the key.

    sshd starts before systemd-user-sessions.service removes /run/nologin. Until then it accepts the key, PAM
    refuses the account, and sshd closes the connection within the authentication (auth2.c: userauth_finish).
    paramiko reports that as an AuthenticationException, and only its text distinguishes it from a refused key
    (auth_handler.py: wait_for_response).
    """
    return "saw EOF" in str(error)


def _explain(target: Target, host_key: str, error: BaseException) -> ConnectError:
    """Return what a failed connection means to a user, and whether waiting may help."""
    if refused := _explain_login(target, host_key, error):
        return refused
    where = target.where
    if isinstance(error, ConnectionRefusedError):
        return ConnectError(
            f"{where}: connection refused",
            hint="its SSH server does not run: it is booting, or has failed; `cloudddp status` shows it",
            patience=inf,
        )
    if isinstance(error, TimeoutError) or getattr(error, "errno", None) in (
        errno.EHOSTUNREACH,
        errno.ENETUNREACH,
    ):
        return ConnectError(
            f"{where}: no answer",
            hint=target.route.silent_hint,
            patience=inf,
            silent=True,
        )
    if closed := early_close_in(error):
        return ConnectError(
            f"{where}: {one_line(closed, 300)}",
            hint=f"{EARLY_CLOSE_HINT}. Or it is booting: `cloudddp status` shows its state",
            patience=inf,
            closed_early=True,
        )
    if any(text in str(error) for text in ("protocol banner", "protocol version", "No existing session")):
        return ConnectError(
            f"{where}: it accepts connections, but does not speak SSH",
            hint="it is booting, or hangs; `cloudddp status` shows its state, `cloudddp resume --replace "
            "NODE` replaces it and resumes the last job",
            patience=inf,
        )
    return ConnectError(f"{where}: {reason_of(error)}", patience=inf)


def _explain_login(target: Target, host_key: str, error: BaseException) -> ConnectError | None:
    """The same for an SSH server that answers: its host key, and the login; None for another error."""
    import paramiko

    where = target.where
    if isinstance(error, paramiko.BadHostKeyException):
        return ConnectError(
            f"{where}: its host key is not the one recorded for this node: refused "
            f"(expected {host_key.split()[1][-16:]}, got {error.key.get_base64()[-16:]})",
            hint="another machine answers at that address; run `cloudddp status`, and do not log in by hand",
            shown=f"{error.key.get_name()} {error.key.get_base64()}",
        )
    if isinstance(error, paramiko.AuthenticationException) and _closed_by_server(error):
        return ConnectError(
            f"{where}: it closes the connection during the login",
            hint="it is booting, and refuses logins until it has booted (/run/nologin); `cloudddp status` "
            "shows its state",
            patience=inf,
        )
    if isinstance(error, paramiko.AuthenticationException):
        return ConnectError(
            f"{where}: the cluster's key is refused for user {target.user!r}",
            hint="is cluster.user the login user of the image (ubuntu, ec2-user)?",
            patience=timing.current().key,
        )
    if isinstance(error, paramiko.SSHException) and "not found in known_hosts" in str(error):
        return ConnectError(
            f"{where}: it presents no {host_key.split()[0]} host key, so it cannot be verified: refused",
            hint="did cloud-init run on the image? look at the instance's system log in the AWS console",
        )
    return None
