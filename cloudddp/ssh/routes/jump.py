"""A jump host: one SSH connection that all nodes share, with a forwarded TCP stream (direct-tcpip) to each of them.

The jump host's key is checked against the user's own known_hosts, and never added; the user's agent and key files log in.
The nodes' host keys are checked end to end, so the jump host can end a connection, but not read it.
"""

from __future__ import annotations

import functools
import shlex
import shutil
import threading
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from math import inf
from typing import TYPE_CHECKING, Any

from cloudddp.config.timing import Timing
from cloudddp.errors import Command, ConnectError, Text, ToolCommand
from cloudddp.ssh import early_close, node_socket, paramiko_fixes
from cloudddp.ssh.routes.known_hosts import FILES, KnownHosts, Verdict
from cloudddp.ssh.routes.user_config import JumpHost, jump_host, openssh_files
from cloudddp.ssh.target import Stream, Target
from cloudddp.text import one_line, reason_of

if TYPE_CHECKING:
    import paramiko

_WINDOW = 16 << 20  # bytes in flight per node: 2 MiB, paramiko's default, limits a 100 ms path to 20 MB/s
# Signature algorithms of a key type that has several (RFC 8332).
_ALGORITHMS = {"ssh-rsa": ("rsa-sha2-512", "rsa-sha2-256")}
_FORBIDDEN = 1  # SSH_OPEN_ADMINISTRATIVELY_PROHIBITED, RFC 4254 section 5.1


class Jump:
    """A route through `[user@]host[:port]`. It connects when it is first used, and again after the connection broke."""

    def __init__(self, given: str) -> None:
        self.silent_hint: Text = (
            "does the jump host reach the node's subnet, and does the security group of the nodes admit it? ",
            Command("allow-me"),
            " admits its present address",
        )
        self._given = given
        self._lock = threading.Lock()
        self._client: paramiko.SSHClient | None = None
        self._attempt: Future[paramiko.SSHClient] | None = None
        self._closed = False
        self._users = 0

    @functools.cached_property
    def _host(self) -> JumpHost:
        return jump_host(self._given)  # reads the user's configuration

    def open(self, target: Target, timeout: float, limits: Timing) -> Stream:
        import paramiko

        transport = self.connect(timeout, limits).get_transport()
        try:
            if transport is None:
                raise EOFError
            channel: Stream = transport.open_channel(
                "direct-tcpip",
                (target.host, target.port),
                ("127.0.0.1", 0),
                window_size=_WINDOW,
                timeout=timeout,
            )
            channel.round_trip = lambda: None  # type: ignore[method-assign]  # it is not known
            return channel
        except paramiko.ChannelException as error:
            raise self._refused(target, error) from None
        except (OSError, EOFError, paramiko.SSHException) as error:
            if transport is not None and transport.is_active():
                raise TimeoutError(str(error)) from None  # its own attempt to connect takes longer than ours
            raise ConnectError(
                f"{self._host.where}: the connection broke ({reason_of(error) if str(error) else 'closed'})",
                hint="is the jump host still running?",
                patience=inf,
            ) from None

    def connect(self, timeout: float, limits: Timing) -> paramiko.SSHClient:
        """Return the shared connection. Threads that need it at the same time share one attempt. Raises ConnectError."""
        with self._lock:
            if self._closed:
                raise ConnectError(f"{self._host.where}: the connection was closed")
            transport = self._client.get_transport() if self._client else None
            if self._client is not None and transport is not None and transport.is_active():
                return self._client
            attempt, mine = self._attempt, self._attempt is None
            if attempt is None:
                attempt = self._attempt = Future()
        if mine:
            self._run(attempt, timeout, limits)
        try:
            return attempt.result(4 * timeout)  # of TCP, key exchange and login, each with its own limit
        except FutureTimeout:
            raise ConnectError(f"{self._host.where}: no answer", patience=inf) from None

    def _run(self, attempt: Future[paramiko.SSHClient], timeout: float, limits: Timing) -> None:
        try:
            client = _log_in(self._host, timeout, limits)
        except BaseException as error:
            with self._lock:
                self._attempt = None
            attempt.set_exception(error)
            return
        with self._lock:
            old, self._attempt = self._client, None
            self._client = None if self._closed else client
        if old is not None:
            old.close()
        if self._closed:
            client.close()
            attempt.set_exception(ConnectError("the connection to the jump host was closed"))
        else:
            attempt.set_result(client)

    def _refused(self, target: Target, error: paramiko.ChannelException) -> ConnectError:
        host, why = self._host, one_line(str(error.text), 200)
        if error.code == _FORBIDDEN:
            return ConnectError(
                f"{host.where}: it does not forward connections ({why})",
                hint="AllowTcpForwarding and PermitOpen in its sshd_config must allow the nodes",
            )
        return ConnectError(
            f"{target.label} at {target.host} port {target.port}: the {host.where} cannot connect to it ({why})",
            hint=self.silent_hint,
            patience=inf,
        )

    def explain(self, _target: Target, _stream: Stream | None) -> ConnectError | None:
        """Return whether the jump host was lost meanwhile."""
        with self._lock:
            transport = self._client.get_transport() if self._client else None
        if transport is not None and transport.is_active():
            return None
        return ConnectError(
            f"{self._host.where}: the connection broke", hint="is it still running?", patience=inf
        )

    def openssh_options(self, target: Target) -> list[str]:
        words = [
            shutil.which("ssh") or "ssh",
            "-o",
            "StrictHostKeyChecking=yes",
            "-o",
            "ClearAllForwardings=yes",
            *openssh_files(),
        ]
        command = shlex.join([*words, "-W", f"[{target.host}]:{target.port}", *self._host.ssh])
        return [f"ProxyCommand={command.replace('%', '%%')}"]

    def retain(self) -> None:
        with self._lock:
            self._users += 1
            self._closed = False

    def close(self) -> None:
        with self._lock:
            self._users = max(self._users - 1, 0)
            if self._users:
                return
            self._closed = True
            client, self._client = self._client, None
        if client is not None:
            client.close()


class _Verification:
    """Host key verification for paramiko, which calls it for each host that it has no key of: here every host."""

    def __init__(self, host: JumpHost) -> None:
        self._name = host.known_as.lower()
        self._known = KnownHosts()
        self.refused: Verdict | None = None
        self.shown: paramiko.PKey | None = None

    def transport(self, stream: Stream, **options: Any) -> paramiko.Transport:
        """Return a transport that asks the host for a key of a type that is known, if there is one."""
        from cloudddp.ssh.transport import make_transport

        transport = make_transport(stream, **options)
        offered = transport.get_security_options()
        wanted = [name for kind in self._known.types(self._name) for name in _ALGORITHMS.get(kind, (kind,))]
        first = [name for name in wanted if name in offered.key_types]
        offered.key_types = [*first, *(name for name in offered.key_types if name not in first)]
        return transport

    def missing_host_key(self, _client: paramiko.SSHClient, _name: str, key: paramiko.PKey) -> None:
        import paramiko

        self.shown = key
        verdict = self._known.verdict(self._name, key.get_name(), key.get_base64())
        if verdict is not Verdict.KNOWN:
            self.refused = verdict
            raise paramiko.SSHException("host key refused")


def _log_in(host: JumpHost, timeout: float, limits: Timing) -> paramiko.SSHClient:
    import paramiko

    paramiko_fixes.silence_log()
    verification = _Verification(host)
    client = paramiko.SSHClient()
    client.set_missing_host_key_policy(verification)  # which has the methods of a policy
    stream = None
    try:
        stream = node_socket.connect(host.host, host.port, timeout, limits.dead)
        client.connect(
            host.host,
            host.port,
            username=host.user,
            sock=stream,
            timeout=timeout,
            banner_timeout=timeout,
            auth_timeout=timeout,
            key_filename=list(host.keys) or None,
            look_for_keys=not host.keys,
            transport_factory=verification.transport,
        )
    except (OSError, EOFError, paramiko.SSHException) as error:
        raise _explain(host, error, verification) from None
    finally:
        transport = client.get_transport()
        if transport is None or not transport.is_authenticated():
            client.close()
            if stream is not None:
                stream.close()
    assert transport is not None  # noqa: S101  connect() succeeded
    transport.set_keepalive(limits.keepalive)
    paramiko_fixes.apply(transport)
    return client


def _explain(host: JumpHost, error: BaseException, verification: _Verification) -> ConnectError:
    """Return what a failed connection to the jump host means, and whether waiting may help."""
    import paramiko

    login = ToolCommand("ssh", *host.ssh)
    shown = (
        f"refused (it presents {_print(verification.shown)})" if verification.shown is not None else "refused"
    )
    match verification.refused:
        case Verdict.UNKNOWN:
            return ConnectError(
                f"{host.where}: its host key is not in {FILES[0]}, so it cannot be verified: {shown}",
                hint=("log in once, compare the fingerprint, and accept it: ", login),
            )
        case Verdict.CHANGED:
            return ConnectError(
                f"{host.where}: its host key is not the one in {FILES[0]}: {shown}",
                hint=(
                    f"if the jump host was replaced: `ssh-keygen -R {shlex.quote(host.known_as)}`, then ",
                    login,
                ),
            )
        case Verdict.REVOKED:
            return ConnectError(f"{host.where}: its host key is revoked in {FILES[0]}: {shown}")
    if isinstance(error, paramiko.AuthenticationException) or "No authentication methods" in str(error):
        return ConnectError(
            f"{host.where}: it accepts none of your keys ({one_line(str(error), 200)})",
            hint=(
                "does ",
                login,
                " log in without asking? add your key to the agent with `ssh-add`; for any other login, "
                f'set proxy_command = "ssh -W %a:%p {one_line(host.given)}" instead of proxy_jump',
            ),
        )
    if closed := early_close.reason_in(error):
        return ConnectError(
            f"{host.where}: {one_line(closed, 300)}", hint=early_close.PENALTIES, patience=inf
        )
    if isinstance(error, ConnectionRefusedError):
        why = "connection refused"
    elif isinstance(error, TimeoutError):
        why = "no answer"
    else:
        why = reason_of(error)
    return ConnectError(f"{host.where}: {why}", hint=("does ", login, " work?"), patience=inf)


def _print(key: paramiko.PKey) -> str:
    return f"{key.get_name()} {key.fingerprint}"
