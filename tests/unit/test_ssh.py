"""One SSH connection: verification of the server, running commands, and errors."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import subprocess
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import paramiko
import pytest
from support.hostilessh import Accepting, listening, transport_of
from support.sshserver import Server, Site, refusal

from cloudddp.config import timing
from cloudddp.errors import ConnectError, NodeError
from cloudddp.ssh import login_shell
from cloudddp.ssh.connection import Connection
from cloudddp.ssh.running import CommandSpec
from cloudddp.ssh.target import generate_key

MIB = 1 << 20
HANG_GUARD = 300.0  # seconds; only a hang is this long


def test_wrong_host_key_is_refused_before_login(ssh_site: Site, server: Server) -> None:
    expected = generate_key().public
    error = refusal(ssh_site.target(server.port, host_keys=(expected,)))
    assert not [part for part in ("host key", "refused", "node 0 (i-0)") if part not in error.message]
    assert expected.split()[1][-16:] in error.message
    assert ssh_site.host.public.split()[1][-16:] in error.message
    assert error.patience == 0
    other = ssh_site.server(algorithm="ecdsa-sha2-nistp256")
    error = refusal(ssh_site.target(other.port))
    assert (error.patience, "presents no ssh-ed25519 host key" in error.message) == (0, True)
    assert (len(server.connections), len(other.connections)) == (1, 1)
    assert server.logins == other.logins == []


def test_refused_login_key_allows_a_retry_and_the_users_keys_are_not_offered(
    ssh_site: Site, server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A home full of keys would use up the attempts that a server allows."""
    (tmp_path / ".ssh").mkdir()
    (tmp_path / ".ssh" / "id_ed25519").write_text(ssh_site.login.private)
    monkeypatch.setenv("HOME", str(tmp_path))
    other = tmp_path / "other"
    other.write_text(generate_key().private)
    error = refusal(ssh_site.target(server.port, private_key=other))
    assert "key is refused for user 'ubuntu'" in error.message
    assert error.patience > 0
    error = refusal(ssh_site.target(server.port, user="ec2-user"))
    assert "'ec2-user'" in error.message
    assert "cluster.user" in error.hint


def test_connection_refused_allows_a_retry(ssh_site: Site) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))  # bound but not listening: no other process gets the port
        error = refusal(ssh_site.target(holder.getsockname()[1]))
    assert "connection refused" in error.message
    assert error.patience > 0


def test_silent_server_times_out_and_prints_nothing(ssh_site: Site) -> None:
    """In a separate process, since paramiko would print from a thread."""
    code = (
        "from cloudddp.ssh.connection import Connection\n"
        "try: Connection.open(target, connect_timeout=0.5)\n"
        "except ConnectError as error: print(error.patience, error.message)\n"
        "[t.join(30) for t in threading.enumerate() if t is not threading.main_thread()]\n"
    )
    with socket.create_server(("127.0.0.1", 0)) as silent:
        words = ssh_site.program(silent.getsockname()[1], code)
        done = subprocess.run(words, capture_output=True, text=True, timeout=300, check=True)
    assert done.stdout.startswith("inf n at 127.0.0.1 port")
    assert "does not speak SSH" in done.stdout
    assert done.stderr == ""


def reset(peer: socket.socket) -> None:
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    peer.close()


def refuse_with_a_line(peer: socket.socket) -> None:
    peer.sendall(b"Not allowed at this time\r\n")
    peer.shutdown(socket.SHUT_WR)


@pytest.mark.parametrize(
    ("serve", "line"),
    [
        (lambda peer: peer.shutdown(socket.SHUT_RDWR), ""),
        (reset, ""),
        (refuse_with_a_line, ", after 'Not allowed at this time'"),
    ],
    ids=["closed", "reset", "closed after a line"],
)
def test_connection_closed_before_the_banner_names_penalties(
    ssh_site: Site, serve: Callable[[socket.socket], Any], line: str
) -> None:
    """sshd does that to an address that it penalizes (sshd_config(5), PerSourcePenalties)."""
    with listening(serve) as port:
        error = refusal(ssh_site.target(port))
    closed = f"at 127.0.0.1 port {port}: the server closed the connection before its SSH banner{line}"
    assert error.message == f"node 0 (i-0) {closed}"
    assert "PerSourcePenalties, OpenSSH 9.8 and newer" in error.hint
    assert error.patience > 0
    error.other_node = 1  # others answer, since penalties are those of one node: it must not be replaced
    assert "PerSourcePenalties" in error.hint
    assert "--replace" not in error.hint


def test_stdout_stderr_and_exit_code_are_separate(connection: Connection, server: Server) -> None:
    result = connection.run(CommandSpec(r"printf 'out\377\n'; printf err >&2; exit 7"))
    assert server.logins == ["ubuntu"]
    assert (result.exit_code, result.stdout, result.stderr) == (7, b"out\xff\n", b"err")
    assert connection.run(CommandSpec("exit 255")).exit_code == 255
    assert connection.run(CommandSpec("echo before; kill -9 $$")).exit_code == 255
    assert connection.run(CommandSpec("echo after")).stdout == b"after\n"
    assert connection._stream._socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) != 0


NOISE = {
    "a line": "echo environment ready",
    "no line break": "printf ready",
    "stderr": "echo warning >&2",
    "the text of commands": "set -xv",
    "a lot": "head -c 3000000 /dev/zero; echo",
    "bytes that are not UTF-8": "printf '\\377\\0'",
}


@pytest.mark.parametrize("start_file", NOISE.values(), ids=NOISE)
@pytest.mark.parametrize("until_exit", [False, True])
def test_what_start_files_print_is_skipped(ssh_site: Site, start_file: str, until_exit: bool) -> None:
    target = ssh_site.target(ssh_site.server(start_file=start_file).port)
    out, err = bytearray(), bytearray()
    command = "cat; printf 'no line break'; printf '\\377' >&2; exit 3"
    spec = CommandSpec(command, b"\0\377\n", 60, out.extend, err.extend, until_exit=until_exit)
    with contextlib.closing(Connection.open(target)) as connection:
        assert connection.run(spec).exit_code == 3
    assert (bytes(out), bytes(err)) == (b"\0\377\nno line break", b"\377")
    assert (target.label in login_shell.first_lines) == (start_file not in ("set -xv", "echo warning >&2"))


@pytest.fixture(autouse=True)
def no_recorded_noise() -> None:
    login_shell.first_lines.clear()


def test_shell_that_ends_before_the_command_is_named(ssh_site: Site) -> None:
    server = ssh_site.server(start_file="echo 'This account is not available.'; exit 7")
    opened = Connection.open(ssh_site.target(server.port))
    with contextlib.closing(opened), pytest.raises(NodeError) as caught:
        opened.run(CommandSpec("true"))
    why = "its login shell ended before it ran the command (exit code 7): This account"
    assert why in caught.value.message
    assert not [part for part in ("~/.bashrc", "cloudddp ssh 0") if part not in caught.value.hint]


def test_syntax_error_is_the_command_s_own(connection: Connection) -> None:
    done = connection.run(CommandSpec("echo 'open"))
    assert done.exit_code == 2
    assert b"nterminated" in done.stderr or b"unexpected" in done.stderr.lower()


@pytest.mark.parametrize(
    "command", ["sleep 1000 & echo ok", "(sleep 1000; echo late) & echo ok", "yes >&2 & sleep 0.2; echo ok"]
)
def test_command_ends_although_a_process_in_the_background_holds_its_output(
    connection: Connection, command: str
) -> None:
    done = connection.run(
        CommandSpec(f"{command}; exit 4", command_timeout=None, on_stderr=len, until_exit=True)
    )
    assert (done.exit_code, done.stdout) == (4, b"ok\n")


def test_large_input_and_output_at_the_same_time(connection: Connection) -> None:
    data = os.urandom(6 * MIB)
    result = connection.run(CommandSpec("tee /dev/stderr", stdin=data, limit=8 * MIB))
    assert result.stdout == result.stderr == data


def test_input_and_output_streams(connection: Connection) -> None:
    taken: list[bytes] = []
    pieces = [os.urandom(200_000) for _ in range(10)]
    result = connection.run(CommandSpec("cat; echo end", stdin=iter([*pieces, b""]), on_stdout=taken.append))
    assert (b"".join(taken), result.stdout) == (b"".join(pieces) + b"end\n", b"")
    for code in (0, 3):  # input that is not read is no error
        assert connection.run(CommandSpec(f"exit {code}", stdin=bytes(8 * MIB))).exit_code == code


def test_error_in_the_input_or_in_the_output_callback_ends_the_command(connection: Connection) -> None:
    def pieces() -> Iterator[bytes]:
        yield b"first"
        raise BrokenPipeError("gone")

    for spec in (CommandSpec("cat", stdin=pieces()), CommandSpec("echo x", on_stdout=lambda _: [*pieces()])):
        with pytest.raises(BrokenPipeError, match="gone"):
            connection.run(spec)
        assert connection.run(CommandSpec("echo on")).stdout == b"on\n"


def test_command_timeout_names_node_and_command(connection: Connection) -> None:
    with pytest.raises(NodeError, match=r"node 0 \(i-0\): no answer for 0\.5 s to: sleep 1000") as caught:
        connection.run(CommandSpec("sleep 1000", command_timeout=0.5))
    assert "cloudddp status" in caught.value.hint
    assert connection.run(CommandSpec("echo on")).stdout == b"on\n"


class SilentServer(Accepting):
    """Answers one kind of request ("open" or "run") only once `may_answer` is set."""

    def __init__(self, silent: str) -> None:
        self.silent, self.answered, self.may_answer = silent, False, threading.Event()

    def check_channel_request(self, _kind: str, _number: int) -> int:
        self._wait("open")
        return int(paramiko.OPEN_SUCCEEDED)

    def check_channel_exec_request(self, _channel: paramiko.Channel, _command: bytes) -> bool:
        self._wait("run")
        return True

    def _wait(self, request: str) -> None:
        if self.silent == request:
            self.may_answer.wait(HANG_GUARD)
            self.answered = True


@pytest.mark.parametrize(
    ("request_for", "limits", "message"),
    [
        ("open", {"command_timeout": 1}, "no answer for 1 s"),
        ("run", {"command_timeout": 1}, "no answer for 1 s"),
        ("run", {"command_timeout": 60, "total_timeout": 2}, "its answer did not end within 2 s"),
        ("open", {"command_timeout": None}, "no answer for 3 s"),
    ],
)
@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
def test_server_that_never_starts_the_command_times_out(
    ssh_site: Site, request_for: str, limits: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if limits["command_timeout"] is None:
        monkeypatch.setenv(timing.VARIABLE, "0.05")  # Timing.start becomes 3 s
    silent = SilentServer(request_for)
    with socket.create_server(("127.0.0.1", 0)) as listening, ThreadPoolExecutor(1) as pool:
        opening = pool.submit(Connection.open, ssh_site.target(listening.getsockname()[1]))
        transport = transport_of(listening.accept()[0], ssh_site.host.private)
        transport.start_server(server=silent)
        with contextlib.closing(transport), contextlib.closing(opening.result(HANG_GUARD)) as connection:
            with pytest.raises(NodeError, match=rf"node 0 \(i-0\): {message} to: true"):
                connection.run(CommandSpec("true", **limits))
            assert not silent.answered
            silent.may_answer.set()


def test_lost_connection_is_an_error_not_an_exit_code(ssh_site: Site, server: Server) -> None:
    """Repeated, since paramiko reports the end of the connection and of its channels in either order."""
    for _ in range(8):
        connection = Connection.open(ssh_site.target(server.port))
        began = threading.Event()
        with ThreadPoolExecutor(1) as pool:
            running = pool.submit(
                connection.run,
                CommandSpec("echo began; sleep 1000", on_stdout=lambda _, began=began: began.set()),
            )
            assert began.wait(60)
            server.drop()
            with pytest.raises(NodeError, match="the SSH connection broke"):
                running.result(60)
        with pytest.raises(NodeError, match="broke"):
            connection.run(CommandSpec("echo again"))
        connection.close()


def test_total_timeout_ends_a_trickling_command(connection: Connection) -> None:
    for to in ("", ">&2"):
        command = f"while :; do printf ' ' {to}; sleep 0.1; done"
        with pytest.raises(NodeError, match="its answer did not end within 1 s"):
            connection.run(CommandSpec(command, command_timeout=60, total_timeout=1))
    assert connection.run(CommandSpec("echo here")).stdout == b"here\n"


def test_close_ends_a_command_in_another_thread(connection: Connection) -> None:
    began = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        spec = CommandSpec("echo began; sleep 1000", on_stdout=lambda _: began.set())
        running = pool.submit(connection.run, spec)
        assert began.wait(60)
        connection.close()
        with pytest.raises(NodeError):
            running.result(60)


@pytest.mark.parametrize("size", [None, 0, 60, 200, 300])
def test_missing_or_truncated_private_key_is_named_and_not_retried(
    ssh_site: Site, tmp_path: Path, size: int | None
) -> None:
    path = tmp_path / "key"
    if size is not None:
        path.write_text(ssh_site.login.private[:size])
    target = ssh_site.target(ssh_site.server().port, private_key=path)
    with pytest.raises(ConnectError, match="cannot read the cluster's private key: ") as caught:
        Connection.open(target)
    assert str(path) in caught.value.message
    assert caught.value.patience == 0
