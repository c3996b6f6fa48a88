"""An SSH server that only forwards TCP, as a jump host does, on a loopback port."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import asyncssh

from cloudddp.ssh.target import generate_key


class JumpServer:
    """Accepts one user and one key. `logins` counts connections, `streams` what they forward. `allow=False`
    refuses."""

    def __init__(self, home: Path, *, user: str = "jumper", allow: bool = True) -> None:
        self.user, self.allow = user, allow
        self.logins: list[str] = []
        self.streams: list[tuple[str, int]] = []
        self._host, self._login = generate_key(), generate_key()
        self._open: set[Any] = set()
        self._home = home
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        self.start(0)

    def start(self, port: int) -> None:
        """Listen on a port; 0 chooses a free one."""
        outer = self

        class Authentication(asyncssh.SSHServer):
            def connection_made(self, conn: Any) -> None:
                self._conn = conn
                outer._open.add(conn)

            def begin_auth(self, _username: str) -> bool:
                return True

            def public_key_auth_supported(self) -> bool:
                return True

            def validate_public_key(self, username: str, key: Any) -> bool:
                good = asyncssh.import_public_key(outer._login.public)
                return username == outer.user and bool(key == good)

            def auth_completed(self) -> None:
                outer.logins.append(outer.user)

            def connection_requested(self, dest_host: str, dest_port: int, *_: Any) -> bool:
                outer.streams.append((dest_host, dest_port))
                if not outer.allow:  # as OpenSSH with AllowTcpForwarding no
                    code = asyncssh.OPEN_ADMINISTRATIVELY_PROHIBITED
                    raise asyncssh.ChannelOpenError(code, "open failed")
                return True

        async def listen() -> Any:
            key = asyncssh.import_private_key(self._host.private)
            return await asyncssh.listen(
                "127.0.0.1", port, server_factory=Authentication, server_host_keys=[key]
            )

        self._listener = self._do(listen())
        self.port = self._listener.get_port()

    def _do(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(30)

    @property
    def given(self) -> str:
        """The setting proxy_jump for it."""
        return f"{self.user}@127.0.0.1:{self.port}"

    @property
    def known_line(self) -> str:
        return f"[127.0.0.1]:{self.port} {self._host.public}\n"

    def write_ssh_files(self, *, known: str | None = None) -> None:
        """Write ~/.ssh of a user who has the key, and has logged in before."""
        folder = self._home / ".ssh"
        folder.mkdir(exist_ok=True)
        key = folder / "id_ed25519"
        key.touch(mode=0o600)
        key.write_text(self._login.private)
        (folder / "known_hosts").write_text(self.known_line if known is None else known)

    def drop(self) -> None:
        """Break every connection."""

        async def work() -> None:
            for connection in list(self._open):
                connection.abort()
            self._open.clear()

        self._do(work())

    def stop(self) -> None:
        """Break every connection, and accept no other."""

        async def work() -> None:
            self._listener.close()
            await self._listener.wait_closed()

        self._do(work())
        self.drop()

    def close(self) -> None:
        self.stop()
        self._loop.call_soon_threadsafe(self._loop.stop)
