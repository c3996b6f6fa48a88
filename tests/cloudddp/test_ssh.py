"""One connection to one node: who it talks to, what it carries, and what it says when something breaks."""

from __future__ import annotations

import contextlib
import io
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import paramiko
import pytest
from sshserver import Server, Site, site

from cloudddp.errors import CloudDDPError, ConnectError, NodeError
from cloudddp.ssh import channel as one_channel
from cloudddp.ssh import connection as connections
from cloudddp.ssh import keys
from cloudddp.ssh.connection import Connection, Target

MIB = 1 << 20
HANG_GUARD = 60.0  # seconds; only a hang is this long


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Site]:
    with site(tmp_path) as made:
        yield made


@pytest.fixture
def server(place: Site) -> Server:
    return place.server()


@pytest.fixture
def connection(place: Site, server: Server) -> Iterator[Connection]:
    made = Connection.open(place.target(server.port))
    yield made
    made.close()


def refusal(target: Target, *, connect_timeout: float = 20.0) -> ConnectError:
    with pytest.raises(ConnectError) as caught:
        Connection.open(target, connect_timeout=connect_timeout)
    return caught.value


# -- the door --------------------------------------------------------------------------------------------------


def test_a_node_that_proves_itself_is_logged_in_to(connection: Connection, server: Server) -> None:
    assert connection.run("echo here").stdout == b"here\n"
    assert connection.alive
    assert server.logins == ["ubuntu"]


def test_a_wrong_host_key_is_refused_with_the_reason_before_any_login(place: Site, server: Server) -> None:
    expected = keys.generate().public
    error = refusal(place.target(server.port, host_keys=(expected,)))
    assert "host key" in error.message
    assert "refused" in error.message
    assert "node 0 (i-0)" in error.message
    assert expected.split()[1][-16:] in error.message
    assert place.host.public.split()[1][-16:] in error.message
    assert error.patience == 0
    assert len(server.connections) == 1
    assert server.logins == []


def test_a_host_key_of_another_kind_is_refused_before_any_login(place: Site) -> None:
    server = place.server(algorithm="ecdsa-sha2-nistp256")
    error = refusal(place.target(server.port))
    assert "refused" in error.message
    assert error.patience == 0
    assert server.logins == []


def test_a_key_that_the_node_does_not_know_is_refused_and_may_come_later(
    place: Site, server: Server, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    other.write_text(keys.generate().private)
    error = refusal(place.target(server.port, private_key=other))
    assert "key is refused for user 'ubuntu'" in error.message
    assert error.patience > 0


def test_another_user_is_refused_with_a_hint_at_the_setting(place: Site, server: Server) -> None:
    error = refusal(place.target(server.port, user="ec2-user"))
    assert "'ec2-user'" in error.message
    assert "cluster.user" in error.hint


def test_nobody_listening_may_be_a_node_that_boots(place: Site) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))  # bound and not listening: nobody else gets the port meanwhile
        error = refusal(place.target(holder.getsockname()[1]))
    assert "connection refused" in error.message
    assert error.patience > 0


def test_a_machine_that_accepts_and_never_speaks_is_given_up_and_nothing_is_printed(place: Site) -> None:
    """In a process of its own, since paramiko would print from a thread."""
    code = (
        "import sys; from pathlib import Path; from cloudddp.errors import ConnectError\n"
        "from cloudddp.ssh.connection import Connection, Target\n"
        "key, port, host = sys.argv[1:]\n"
        "try: Connection.open(Target('n', '127.0.0.1', int(port), 'u', Path(key), (host,)), connect_timeout=0.5)\n"
        "except ConnectError as error: print(error.patience, error.message)\n"
        "import threading; [t.join(30) for t in threading.enumerate() if t is not threading.main_thread()]\n"
    )
    with socket.create_server(("127.0.0.1", 0)) as silent:
        arguments = [str(place.private_key), str(silent.getsockname()[1]), place.host.public]
        done = subprocess.run(
            [sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=60, check=True
        )
    assert done.stdout.startswith("inf n at 127.0.0.1 port")
    assert "does not speak SSH" in done.stdout
    assert done.stderr == ""


def test_small_packets_are_not_held_back(connection: Connection) -> None:
    transport = connection._client.get_transport()
    assert transport is not None
    assert transport.sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) != 0


def test_keys_of_the_user_are_not_offered(place: Site, server: Server, tmp_path: Path) -> None:
    """A home full of keys would use up the attempts that a node allows."""
    (tmp_path / ".ssh").mkdir()
    (tmp_path / ".ssh" / "id_ed25519").write_text(place.login.private)
    other = tmp_path / "other"
    other.write_text(keys.generate().private)
    home = os.environ.get("HOME", "")
    os.environ["HOME"] = str(tmp_path)
    try:
        assert "is refused" in refusal(place.target(server.port, private_key=other)).message
    finally:
        os.environ["HOME"] = home


# -- commands --------------------------------------------------------------------------------------------------


def test_output_errors_and_exit_code_come_apart(connection: Connection) -> None:
    result = connection.run(r"printf 'out\377\n'; printf err >&2; exit 7")
    assert (result.exit_code, result.stdout, result.stderr) == (7, b"out\xff\n", b"err")


@pytest.mark.parametrize("code", [0, 1, 127, 255])
def test_the_exit_code_is_the_commands(connection: Connection, code: int) -> None:
    assert connection.run(f"exit {code}").exit_code == code


def test_a_command_that_a_signal_ended_is_a_failure_of_the_command_not_of_the_connection(
    connection: Connection,
) -> None:
    assert connection.run("echo before; kill -9 $$").exit_code == 255
    assert connection.run("echo after").stdout == b"after\n"


def test_much_goes_both_ways_at_once_and_on_the_side(connection: Connection) -> None:
    data = os.urandom(6 * MIB)
    result = connection.run("tee /dev/stderr", stdin=data, limit=8 * MIB)
    assert result.stdout == data
    assert result.stderr == data


def test_input_may_be_a_stream_and_output_may_be_taken_as_it_comes(connection: Connection) -> None:
    taken: list[bytes] = []
    pieces = [os.urandom(200_000) for _ in range(10)]
    result = connection.run("cat; echo end", stdin=iter([*pieces, b""]), on_stdout=taken.append)
    assert b"".join(taken) == b"".join(pieces) + b"end\n"
    assert result.stdout == b""


def test_a_command_that_does_not_read_its_input_is_no_error(connection: Connection) -> None:
    assert connection.run("exit 3", stdin=bytes(8 * MIB)).exit_code == 3
    assert connection.run("exit 0", stdin=bytes(8 * MIB)).exit_code == 0


def test_an_input_that_cannot_be_read_to_its_end_is_told_and_ends_the_command(connection: Connection) -> None:
    def pieces() -> Iterator[bytes]:
        yield b"first"
        raise CloudDDPError("the file is gone")

    with pytest.raises(CloudDDPError, match="the file is gone"):
        connection.run("cat", stdin=pieces())
    assert connection.run("echo on").stdout == b"on\n"


def test_an_error_of_who_takes_the_output_is_told_as_it_is(connection: Connection) -> None:
    def full(data: bytes) -> None:
        raise BrokenPipeError("nobody reads")

    with pytest.raises(BrokenPipeError, match="nobody reads"):
        connection.run("echo x", on_stdout=full)
    assert connection.run("echo on").stdout == b"on\n"


def test_silence_becomes_an_error_that_names_node_and_command(connection: Connection) -> None:
    with pytest.raises(NodeError, match=r"node 0 \(i-0\): no answer for 0\.5 s to: sleep 1000") as caught:
        connection.run("sleep 1000", command_timeout=0.5)
    assert "cloudddp status" in caught.value.hint
    assert connection.run("echo on").stdout == b"on\n"


class Mute(paramiko.ServerInterface):
    """Accepts every login, but answers one kind of request ("open" or "run") only once `may_answer` is set."""

    def __init__(self, silent: str) -> None:
        self.silent = silent
        self.answered = False
        self.may_answer = threading.Event()

    def check_auth_publickey(self, _username: str, _key: paramiko.PKey) -> int:
        return int(paramiko.AUTH_SUCCESSFUL)

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
    ("limits", "said"),
    [
        ({"command_timeout": 1}, "no answer for 1 s"),
        ({"command_timeout": 60, "total_timeout": 2}, "no end of its answer after 2 s"),
        ({"command_timeout": None}, "no answer for 3 s"),
    ],
)
@pytest.mark.parametrize("request_for", ["open", "run"])
def test_a_server_that_does_not_start_the_command_is_silence_too(
    place: Site, request_for: str, limits: dict[str, Any], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "START_SECONDS", 3 if limits["command_timeout"] is None else 600)
    mute = Mute(request_for)
    with socket.create_server(("127.0.0.1", 0)) as listening, ThreadPoolExecutor(1) as pool:
        opening = pool.submit(Connection.open, place.target(listening.getsockname()[1]))
        transport = paramiko.Transport(listening.accept()[0])
        transport.add_server_key(paramiko.Ed25519Key.from_private_key(io.StringIO(place.host.private)))
        transport.start_server(server=mute)
        with contextlib.closing(transport), contextlib.closing(opening.result(HANG_GUARD)) as connection:
            with pytest.raises(NodeError, match=rf"node 0 \(i-0\): {said} to: true"):
                connection.run("true", **limits)
            assert not mute.answered
            mute.may_answer.set()


def late(channel: Any, act: Any) -> None:
    with one_channel.at_most(0.05, channel):
        act()


def test_of_an_answer_and_the_end_of_its_time_only_one_counts(connection: Connection) -> None:
    transport = connection._client.get_transport()
    assert transport is not None
    channel = transport.open_session(timeout=HANG_GUARD)

    def answered_too_late() -> None:
        """As when the answer comes while the channel is being closed."""
        deadline = time.monotonic() + HANG_GUARD
        while not channel.closed and time.monotonic() < deadline:
            time.sleep(0.01)

    with pytest.raises(TimeoutError):
        late(channel, answered_too_late)
    assert channel.closed
    closed = transport.open_session(timeout=HANG_GUARD)
    closed.close()
    closed.event.clear()  # as a request does that is made in that moment
    with pytest.raises(TimeoutError):
        late(closed, lambda: closed.event.wait(HANG_GUARD) or pytest.fail("nobody was woken up"))
    with one_channel.at_most(HANG_GUARD, channel):
        pass
    with pytest.raises(EOFError), one_channel.at_most(HANG_GUARD, channel):
        raise EOFError


def test_a_node_that_dies_in_mid_command_is_an_error_never_an_exit_code(place: Site, server: Server) -> None:
    """Repeated, since the end of the connection and that of its channels are seen in either order."""
    for _ in range(8):
        connection = Connection.open(place.target(server.port))
        began = threading.Event()
        with ThreadPoolExecutor(1) as pool:
            running = pool.submit(
                connection.run, "echo began; sleep 1000", on_stdout=lambda _, began=began: began.set()
            )
            assert began.wait(60)
            server.drop()
            with pytest.raises(NodeError, match="the SSH connection broke"):
                running.result(60)
        assert not connection.alive
        with pytest.raises(NodeError, match="broke"):
            connection.run("echo again")
        connection.close()


def test_command_that_writes_a_byte_now_and_then_is_given_up_all_the_same(connection: Connection) -> None:
    with pytest.raises(NodeError, match="no end of its answer after 1 s"):
        connection.run("while :; do printf ' '; sleep 0.1; done", command_timeout=60, total_timeout=1)
    with pytest.raises(NodeError, match="no end of its answer after 1 s"):
        connection.run("while :; do printf ' ' >&2; sleep 0.1; done", command_timeout=60, total_timeout=1)
    assert connection.run("echo here").stdout == b"here\n"


def test_closing_ends_a_command_that_waits_in_another_thread(connection: Connection) -> None:
    began = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(connection.run, "echo began; sleep 1000", on_stdout=lambda _: began.set())
        assert began.wait(60)
        connection.close()
        with pytest.raises(NodeError):
            running.result(60)


@pytest.fixture
def channels(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The channels that paramiko has closed in this test."""
    import paramiko

    closed: list[paramiko.Channel] = []
    set_closed = paramiko.Channel._set_closed

    def keep(channel: paramiko.Channel) -> None:
        closed.append(channel)
        set_closed(channel)

    monkeypatch.setattr(paramiko.Channel, "_set_closed", keep)
    return closed


def send_late(channel: Any, kind: int, *fields: int | bytes) -> None:
    """Send what paramiko decided to send before the channel was closed, as its threads do when they are slow."""
    import paramiko

    message = paramiko.Message()
    message.add_byte(bytes([kind]))
    message.add_int(channel.remote_chanid)
    for field in fields:
        message.add_int(field) if isinstance(field, int) else message.add_string(field)
    channel.transport._send_user_message(message)


@pytest.mark.parametrize("late", [(93, 300_000), (94, b"data"), (96,)], ids=["window", "data", "eof"])
def test_nothing_is_sent_on_a_channel_after_its_close(
    connection: Connection, server: Server, channels: list[Any], late: tuple[int, ...]
) -> None:
    assert connection.run("true").exit_code == 0
    send_late(channels[0], *late)
    assert connection.run("echo still here").stdout == b"still here\n"
    assert len(server.connections) == 1


def test_no_data_is_sent_on_a_channel_after_its_eof(connection: Connection, server: Server) -> None:
    """paramiko answers CLOSE by EOF and CLOSE, and a thread that feeds the command may come between them."""

    def pieces() -> Iterator[bytes]:
        yield b"data"
        (channel,) = transport._channels.values()
        channel.shutdown_write()
        send_late(channel, 94, b"late")

    transport = connection._client.get_transport()
    assert transport is not None
    assert connection.run("cat", stdin=pieces()).stdout == b"data"
    assert connection.run("echo still here").stdout == b"still here\n"
    assert len(server.connections) == 1


def test_late_data_of_a_closed_channel_does_not_reach_the_next_one_of_that_number(
    connection: Connection, server: Server, channels: list[Any]
) -> None:
    assert connection.run("true").exit_code == 0
    number = channels[0].remote_chanid
    while number in server.connections[0]._channels:
        time.sleep(0.01)  # the answer to its CLOSE is under way
    server.connections[0]._next_recv_chan = number  # sshd takes the lowest free one

    def pieces() -> Iterator[bytes]:
        yield b"first "
        send_late(channels[0], 94, b"late ")
        yield b"second"

    assert connection.run("cat", stdin=pieces()).stdout == b"first second"
    assert channels[-1].remote_chanid == number


def test_channel_that_closes_while_keys_are_exchanged_does_not_end_the_connection(
    connection: Connection, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread that answers CLOSE is the one that exchanges the keys."""
    import paramiko

    close = paramiko.Channel._handle_close

    def handle(channel: paramiko.Channel, message: paramiko.Message) -> None:
        monkeypatch.undo()
        transport = connection._client.get_transport()
        assert transport is not None
        transport._send_kex_init()  # as that thread does before it reads a packet, once 512 MiB have passed
        close(channel, message)

    monkeypatch.setitem(paramiko.Transport._channel_handler_table, 97, handle)
    assert connection.run("true").exit_code == 0
    assert connection.run("echo still here").stdout == b"still here\n"
    assert len(server.connections) == 1


def test_many_commands_run_side_by_side_on_one_connection(connection: Connection, server: Server) -> None:
    together = threading.Barrier(8, timeout=60)

    def one(number: int) -> bytes:
        data = bytes([number]) * 300_000

        def pieces() -> Iterator[bytes]:
            yield data
            together.wait()  # all eight are open at once
            yield b"end"

        return connection.run("cat", stdin=pieces()).stdout

    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(one, range(8)))
    assert found == [bytes([number]) * 300_000 + b"end" for number in range(8)]
    assert len(server.connections) == 1
