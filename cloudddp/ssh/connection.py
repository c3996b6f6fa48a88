"""One SSH connection to one node: strict host key, no Nagle delay, keepalives, a time limit for each wait.

`connect_timeout` limits connecting and authenticating; the limits of a command are in its CommandSpec. If a
node stops answering, keepalives end the connection after Timing.dead seconds. Nothing here retries, or
depends on other nodes.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import logging
from math import inf
from typing import TYPE_CHECKING

from cloudddp import timings
from cloudddp.config import timing
from cloudddp.errors import CloudDDPError, ConnectError
from cloudddp.ssh.login_shell import Marker
from cloudddp.ssh.running import MAX_PACKET, BoundedBuffer, CommandSpec, Input, Result, RunningCommand
from cloudddp.ssh.target import EARLY_CLOSE, EARLY_CLOSE_HINT, KEY_KIND, NodeSocket, Target
from cloudddp.ssh.time_limits import IdleTimer
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


def _make_transport(stream: NodeSocket, timeout: float) -> paramiko.Transport:
    import paramiko
    from paramiko import common
    from paramiko.packet import Packetizer

    ends = common.MSG_CHANNEL_EOF, common.MSG_CHANNEL_CLOSE
    of_input = common.MSG_CHANNEL_DATA, common.MSG_CHANNEL_EOF

    class Packets(Packetizer):  # type: ignore[misc]  # paramiko has no types
        """If the server closes a channel during a key exchange, paramiko's thread waits for itself, and the
        connection breaks after 30 s (https://github.com/paramiko/paramiko/issues/822). paramiko begins one
        every 512 MiB; here it does so as rarely as OpenSSH (RFC 4344, section 3.2: 2**32 blocks).

        Its thread ends and closes a channel when the command ends, also between another thread's look whether
        it may send and its sending. sshd ends the connection for data of a channel that it no longer has, so
        what comes too late is not sent. (read_message, send_message:
        https://docs.paramiko.org/en/latest/api/packet.html)
        """

        REKEY_BYTES = 1 << 36

        def __init__(self, stream: NodeSocket) -> None:
            super().__init__(stream)
            self._ended: dict[bytes, int] = {}  # the server's numbers of channels: EOF or CLOSE, sent last

        def read_message(self) -> tuple[int, paramiko.Message]:
            kind, message = super().read_message()
            if kind == common.MSG_CHANNEL_OPEN_SUCCESS:  # of our number for a channel, and the server's
                self._ended.pop(message.asbytes()[4:8], None)
            return kind, message

        def send_message(self, message: paramiko.Message) -> None:
            # paramiko holds `clear_to_send_lock` meanwhile: one thread at a time sends.
            kind, number = message.asbytes()[0], message.asbytes()[1:5]
            if common.MSG_CHANNEL_WINDOW_ADJUST <= kind <= common.MSG_CHANNEL_FAILURE:
                ended = self._ended.get(number)
                if ended == common.MSG_CHANNEL_CLOSE or (ended and kind in of_input):
                    return
                if kind in ends:
                    self._ended[number] = kind
            super().send_message(message)

    transport = paramiko.Transport(stream, packetizer_class=Packets)
    transport.banner_timeout = transport.auth_timeout = timeout
    # AES-GCM first: with the AES instructions that every x86-64 and arm64 server has, it is faster than a
    # cipher with a separate MAC.
    options = transport.get_security_options()
    options.ciphers = sorted(options.ciphers, key=lambda name: "gcm" not in name)
    return transport


class Connection:
    """An authenticated connection. Thread-safe to close; several commands may run at the same time."""

    def __init__(
        self, target: Target, host_key: str, transport: paramiko.Transport, stream: NodeSocket, window: int
    ) -> None:
        self.target = target
        self.host_key = host_key  # the one that the node has presented
        self.kept: dict[type, object] = {}  # what its user keeps for as long as it lasts, by type
        self.transport = transport
        self.limits = timing.current()
        self._stream = stream
        self._window = window
        self._reason: Exception | None = None

    @classmethod
    def open(
        cls, target: Target, *, connect_timeout: float | None = None, window: int = STREAM_WINDOW
    ) -> Connection:
        """Connect, verify the host key, log in. Raises ConnectError, with patience if the node may still be
        booting.

        `window`: how many bytes of a stream may be in memory if its receiver is slower than the node.
        """
        target.require_host_key()
        limits = timing.current()
        limit = limits.connect if connect_timeout is None else connect_timeout
        with timings.span("imports: paramiko"):
            import paramiko  # noqa: F401  0.2 s, which commands without SSH do not need; likewise below

        log = logging.getLogger("paramiko")
        if not log.handlers:  # its threads would print tracebacks: the error that we raise has what they log
            log.addHandler(logging.NullHandler())
        login_key = _login_key(target)
        stream: NodeSocket | None = None
        with contextlib.ExitStack() as opened:
            try:
                stream = opened.enter_context(contextlib.closing(target.route.open(target, limit, limits)))
                transport = opened.enter_context(contextlib.closing(_make_transport(stream, limit)))
                host_key = _log_in(target, transport, login_key, limit)
            except CloudDDPError:
                raise
            except Exception as error:  # of any type, if a packet was invalid
                raise _explain(target, stream, error) from None
            transport.set_keepalive(limits.keepalive)
            opened.pop_all()
        return cls(target, host_key, transport, stream, window)

    def run(self, spec: CommandSpec) -> Result:
        """Run a command to its end and return its result.

        Raises NodeError also if the connection breaks or a time limit passes.
        """
        out, err = (BoundedBuffer(self.target.label, spec.limit) for _ in range(2))
        receivers = spec.on_stdout or out.add, spec.on_stderr or err.add
        idle = IdleTimer(spec.command_timeout, spec.total_timeout)
        marker = Marker(at_exit=spec.until_exit, has_input=spec.stdin != b"")
        is_stream = spec.on_stdout is not None
        with contextlib.closing(self.start(spec.command, idle, marker, is_stream=is_stream)) as running:
            code = running.exchange(Input(spec.stdin), receivers, idle)
        return Result(255 if code is None else code, bytes(out.data), bytes(err.data))

    def start(
        self, command: str, idle: IdleTimer, marker: Marker | None = None, *, is_stream: bool = True
    ) -> RunningCommand:
        """Start a command. `is_stream`: its output is passed on as it arrives. Raises NodeError."""
        window = self._stream_window() if is_stream else DEFAULT_WINDOW
        return RunningCommand(self, command, marker or Marker(), idle, window)

    def _stream_window(self) -> int:
        """Return the window of a stream: the more, the longer the round trip is; the most where that is not
        known."""
        seconds = self._stream.round_trip()
        if seconds is None:
            return self._window
        return min(self._window, max(DEFAULT_WINDOW, int(seconds * FASTEST)))

    def open_port(self, port: int) -> paramiko.Channel:
        """Return a channel to a port of the node's loopback. Raises OSError if nothing listens there, or the
        connection is closed."""
        import paramiko

        try:
            ends = (LOOPBACK, port), (LOOPBACK, 0)
            return self.transport.open_channel(
                "direct-tcpip", *ends, DEFAULT_WINDOW, MAX_PACKET, timeout=self.limits.start
            )
        except (paramiko.SSHException, EOFError) as error:
            raise OSError(one_line(getattr(error, "text", "") or reason_of(error), 200)) from None

    @property
    def is_open(self) -> bool:
        """Whether it has not broken, and was not closed."""
        return bool(self.transport.is_active())

    def reason_of_end(self) -> Exception | None:
        """Return the error that has ended the connection, None if it is open or was closed."""
        if not self.is_open:  # paramiko forgets the error
            self._reason = self.transport.get_exception() or self._reason
        return self._reason

    def close(self) -> None:
        """Close the connection; a command that waits in another thread ends with NodeError."""
        self.transport.close()
        self._stream.close()


def _login_key(target: Target) -> paramiko.PKey:
    """Return the private login key. Raises ConnectError, without patience: no node can be reached without
    it."""
    import paramiko

    try:
        return paramiko.Ed25519Key.from_private_key_file(str(target.private_key))
    except paramiko.PasswordRequiredException:
        why = "needs a passphrase, which cloudddp's own keys never have"
    except Exception as error:  # of any type, where the file is damaged
        why = f"cannot read the cluster's private key: {reason_of(error)}"
    raise ConnectError(
        f"{target.private_key}: {why}",
        hint="restore the file; without it the nodes cannot be used: `cloudddp down` stops the bill",
    )


def _log_in(target: Target, transport: paramiko.Transport, key: paramiko.PKey, timeout: float) -> str:
    """Verify the host key, log in, and return the host key. Raises ConnectError where either is refused, and
    what paramiko raises."""
    import paramiko

    transport.start_client(timeout=timeout)
    try:
        remote = transport.get_remote_server_key()
    except paramiko.SSHException:  # `start_client` returns also once its time has passed
        raise TimeoutError from None
    shown = f"{remote.get_name()} {remote.get_base64()}"
    if remote.get_name() != KEY_KIND:
        raise ConnectError(
            f"{target.where}: it presents no {KEY_KIND} host key, so it cannot be verified: refused",
            hint="did cloud-init run on the image? look at the instance's system log in the AWS console",
        )
    if shown not in target.host_keys:
        raise ConnectError(
            f"{target.where}: its host key is not the one recorded for this node: refused "
            f"(expected {target.host_keys[0].split()[1][-16:]}, got {remote.get_base64()[-16:]})",
            hint="another machine answers at that address; run `cloudddp status`, and do not log in by hand",
            shown=shown,
        )
    try:
        transport.auth_publickey(target.user, key)
        if transport.is_authenticated():
            return shown
    except paramiko.AuthenticationException:
        # sshd starts before systemd-user-sessions.service removes /run/nologin. Until then it accepts the
        # key, PAM refuses the account, and sshd closes the connection within the authentication (auth2.c:
        # userauth_finish).
        if not transport.is_active():
            raise ConnectError(
                f"{target.where}: it closes the connection during the login",
                hint="it is booting, and refuses logins until it has booted (/run/nologin); `cloudddp "
                "status` shows its state",
                patience=inf,
                may_be_booting=True,
            ) from None
    raise ConnectError(
        f"{target.where}: the cluster's key is refused for user {target.user!r}",
        hint="is cluster.user the login user of the image (ubuntu, ec2-user)?",
        patience=timing.current().key,
    )


def _explain(target: Target, stream: NodeSocket | None, error: Exception) -> ConnectError:
    """Return what a failed connection means to a user, and whether waiting may help."""
    if stream is not None and (cause := target.route.explain(target, stream)):
        return cause
    where, speaks_ssh = target.where, stream is not None and stream.speaks_ssh
    failed = functools.partial(ConnectError, patience=inf)
    if isinstance(error, ConnectionRefusedError):
        hint = "its SSH server does not run: it is booting, or has failed; `cloudddp status` shows it"
        return failed(f"{where}: connection refused", hint=hint, may_be_booting=True)
    is_unreachable = getattr(error, "errno", None) in (errno.EHOSTUNREACH, errno.ENETUNREACH)
    if is_unreachable or (isinstance(error, TimeoutError) and stream is None):
        return failed(f"{where}: no answer", hint=target.route.silent_hint, silent=True)
    if not speaks_ssh and (isinstance(error, ConnectionResetError) or (stream and stream.has_ended)):
        line = stream.greeting() if stream else ""
        return failed(
            f"{where}: {EARLY_CLOSE}" + (f", after {line}" if line else ""),
            hint=f"{EARLY_CLOSE_HINT}. Or it is booting: `cloudddp status` shows its state",
            closed_early=True,
        )
    if stream is not None and (not speaks_ssh or isinstance(error, TimeoutError)):
        return failed(
            f"{where}: it accepts connections, but does not speak SSH",
            hint="it is booting, or hangs; `cloudddp status` shows its state, `cloudddp resume --replace "
            "NODE` replaces it and resumes the last job",
            may_be_booting=True,
        )
    return failed(f"{where}: {reason_of(error)}")
