"""Throughput of a stream from OpenSSH's sshd at a round trip of 100 ms, by the size of the SSH window.

A proxy delays every byte by half of the round trip in each direction; bandwidth is that of loopback. The server is the
computer's own sshd, started for the measurement as the current user.
"""

from __future__ import annotations

import asyncio
import getpass
import shutil
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from cloudddp.ssh import keys
from cloudddp.ssh.connection import DEFAULT_WINDOW, STREAM_WINDOW, Connection
from cloudddp.ssh.running import CommandSpec
from cloudddp.ssh.target import Target

ROUND_TRIP = 0.1  # seconds
MIB = 1 << 20
SIZE = 96 * MIB
_CONFIG = """\
Port {port}
ListenAddress 127.0.0.1
HostKey {folder}/host
AuthorizedKeysFile {folder}/authorized
StrictModes no
UsePAM no
PasswordAuthentication no
PermitRootLogin prohibit-password
PidFile none
"""


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@contextmanager
def server(folder: Path) -> Iterator[Target]:
    """Run sshd; yield where it answers."""
    host, login, port = keys.generate(), keys.generate(), free_port()
    for name, text in (("host", host.private), ("login", login.private), ("authorized", f"{login.public}\n")):
        (folder / name).write_text(text)
        (folder / name).chmod(0o600)
    (folder / "config").write_text(_CONFIG.format(port=port, folder=folder))
    program = shutil.which("sshd", path="/usr/sbin:/usr/bin:/sbin") or "sshd"
    Path("/run/sshd").mkdir(exist_ok=True)
    process = subprocess.Popen([program, "-D", "-e", "-f", str(folder / "config")], stderr=subprocess.DEVNULL)
    try:
        while process.poll() is None:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.02)
        yield Target("sshd", "127.0.0.1", port, getpass.getuser(), folder / "login", (host.public,))
    finally:
        process.terminate()
        process.wait()


@contextmanager
def delayed(port: int) -> Iterator[int]:
    """Run a proxy to a port of this computer that delays each direction by half of the round trip; yield its port."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()

    async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        queue: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()

        async def send() -> None:
            while True:
                due, data = await queue.get()
                await asyncio.sleep(max(due - loop.time(), 0))
                if not data:
                    writer.close()
                    return
                writer.write(data)
                await writer.drain()

        sending = asyncio.ensure_future(send())
        data = b"x"
        while data:
            data = await reader.read(1 << 18)
            queue.put_nowait((loop.time() + ROUND_TRIP / 2, data))
        await sending

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        back, there = await asyncio.open_connection("127.0.0.1", port)
        await asyncio.gather(carry(reader, there), carry(back, writer), return_exceptions=True)

    async def listen() -> asyncio.Server:
        return await asyncio.start_server(accept, "127.0.0.1", 0)

    listener = asyncio.run_coroutine_threadsafe(listen(), loop).result(10)
    yield int(listener.sockets[0].getsockname()[1])
    loop.call_soon_threadsafe(listener.close)


def measure(connection: Connection) -> float:
    """Return MB/s of one stream."""
    received = 0

    def count(data: bytes) -> None:
        nonlocal received
        received += len(data)

    started = time.perf_counter()
    connection.run(CommandSpec(f"head -c {SIZE} /dev/zero", on_stdout=count))
    if received != SIZE:
        raise SystemExit(f"received {received} of {SIZE} bytes")
    return SIZE / 1e6 / (time.perf_counter() - started)


def rates(runs: int) -> dict[int, list[float]]:
    """Return MB/s of each run, by the window in bytes."""
    found: dict[int, list[float]] = {DEFAULT_WINDOW: [], STREAM_WINDOW: []}
    with (
        tempfile.TemporaryDirectory() as folder,
        server(Path(folder)) as target,
        delayed(target.port) as port,
    ):
        away = Target("sshd", target.host, port, target.user, target.private_key, target.host_keys)
        connections = {window: Connection.open(away, window=window) for window in found}
        for _ in range(runs):
            for window, row in found.items():
                row.append(measure(connections[window]))
        for connection in connections.values():
            connection.close()
    return found
