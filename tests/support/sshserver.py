"""An SSH server for tests: asyncssh in a thread, on a free loopback port, which runs commands in a real
shell."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import asyncssh
import pytest

from cloudddp.errors import ConnectError
from cloudddp.ssh.connection import Connection
from cloudddp.ssh.target import Target, generate_key

USER = "ubuntu"
PROGRAM = """
import sys, threading
from pathlib import Path
from cloudddp.errors import ConnectError
from cloudddp.ssh.fleet import Fleet
from cloudddp.ssh.running import CommandSpec
from cloudddp.ssh.target import Target
key, port, host = sys.argv[1:]
target = Target('n', '127.0.0.1', int(port), 'ubuntu', Path(key), (host,))
"""


class Server:
    """Records connections and logins; `drop` aborts every connection, as a failing machine would."""

    def __init__(
        self,
        host_key: str,
        login: str,
        *,
        sock: socket.socket | None = None,
        algorithm: str = "",
        refuse: int = 0,
        nologin: int = 0,
        start_file: str = "",
    ) -> None:
        """`start_file`: commands that the login shell runs first, as those of ~/.bashrc. `refuse`: how many
        logins are refused first, as before the key is installed; `nologin`: during how many the connection is
        closed after that, as sshd does while PAM refuses logins."""
        self.port = 0
        self.connections: list[Any] = []
        self.logins: list[str] = []
        self._key = asyncssh.generate_private_key(algorithm) if algorithm else host_key
        self._login = asyncssh.import_public_key(login)
        self._sock = sock
        self._refuse, self._nologin = refuse, nologin
        self._start_file = start_file
        self._children: set[asyncio.subprocess.Process] = set()
        self._all: list[asyncio.subprocess.Process] = []
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._do(self._listen())

    def _do(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(30)

    async def _listen(self) -> None:
        outer = self

        class Authentication(asyncssh.SSHServer):
            def connection_made(self, conn: Any) -> None:
                self.connection = conn
                outer.connections.append(conn)

            def begin_auth(self, username: str) -> bool:
                outer.logins.append(username)
                return True

            def public_key_auth_supported(self) -> bool:
                return True

            def validate_public_key(self, username: str, key: Any) -> bool:
                if outer._refuse:
                    outer._refuse -= 1
                    return False
                if outer._nologin:
                    outer._nologin -= 1
                    self.connection.abort()
                return bool(username == USER and key == outer._login)

        key = asyncssh.import_private_key(self._key) if isinstance(self._key, str) else self._key
        where: dict[str, Any] = {"sock": self._sock} if self._sock else {"host": "127.0.0.1", "port": 0}
        self._listener = await asyncssh.listen(
            **where,
            server_factory=Authentication,
            server_host_keys=[key],
            process_factory=self._run,
            encoding=None,
        )
        self.port = self._listener.get_port()

    async def _run(self, process: Any) -> None:
        pipes = dict.fromkeys(("stdin", "stdout", "stderr"), asyncio.subprocess.PIPE)
        words = ("sh", "-c", f"{self._start_file}\n{process.command}")
        child = await asyncio.create_subprocess_exec(*words, **pipes, start_new_session=True)  # type: ignore[arg-type]
        self._children.add(child)
        self._all.append(child)

        async def feed() -> None:
            with contextlib.suppress(OSError, asyncssh.Error):
                while data := await process.stdin.read(1 << 16):
                    child.stdin.write(data)  # type: ignore[union-attr]
                    await child.stdin.drain()  # type: ignore[union-attr]
            with contextlib.suppress(OSError):
                child.stdin.close()  # type: ignore[union-attr]

        async def carry(source: Any, sink: Any) -> None:
            while data := await source.read(1 << 16):
                sink.write(data)
                await sink.drain()

        feeding = asyncio.create_task(feed())
        with contextlib.suppress(OSError, asyncssh.Error):
            await asyncio.gather(carry(child.stdout, process.stdout), carry(child.stderr, process.stderr))
            code = await child.wait()
            if code < 0:
                process.exit_with_signal(signal.Signals(-code).name.removeprefix("SIG"))
            else:
                process.exit(code)
        feeding.cancel()
        self._end(child)

    def _end(self, child: asyncio.subprocess.Process) -> None:
        self._children.discard(child)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)

    def drop(self) -> None:
        async def work() -> None:
            for connection in self.connections:
                connection.abort()

        self._do(work())

    def close(self) -> None:
        async def work() -> None:
            self._listener.close()
            for connection in self.connections:
                connection.abort()
            for child in list(self._children):
                self._end(child)
            others = asyncio.all_tasks() - {asyncio.current_task()}
            for task in others:
                task.cancel()
            await asyncio.gather(*others, return_exceptions=True)
            # What ended after the loop has stopped would use the closed loop.
            for child in self._all:
                child._transport.close()  # type: ignore[attr-defined]  # and its pipes, which are no longer read
                await child.wait()
            await asyncio.sleep(0)

        self._do(work())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(30)
        self._loop.close()


class Site:
    """The keys of a cluster, and the servers that a test has started."""

    def __init__(self, folder: Path) -> None:
        self.login, self.host = generate_key(), generate_key()
        self.private_key = folder / "id_ed25519"
        self.private_key.write_text(self.login.private)
        self._servers: list[Server] = []

    def server(self, **options: Any) -> Server:
        server = Server(self.host.private, self.login.public, **options)
        self._servers.append(server)
        return server

    def target(self, port: int, **changes: Any) -> Target:
        target = Target("node 0 (i-0)", "127.0.0.1", port, USER, self.private_key, (self.host.public,))
        return replace(target, **changes)

    def program(self, port: int, code: str) -> list[str]:
        """Return a Python command that has `target`, of a port, and what code about connections imports."""
        return [sys.executable, "-c", PROGRAM + code, str(self.private_key), str(port), self.host.public]

    def close(self) -> None:
        for server in self._servers:
            server.close()


def refusal(target: Target, *, connect_timeout: float = 20.0) -> ConnectError:
    """Return the error of a connection that cannot be opened."""
    with pytest.raises(ConnectError) as caught:
        Connection.open(target, connect_timeout=connect_timeout)
    return caught.value


@contextlib.contextmanager
def site(folder: Path) -> Iterator[Site]:
    created = Site(folder)
    try:
        yield created
    finally:
        created.close()
