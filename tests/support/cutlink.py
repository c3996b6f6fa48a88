"""A TCP link between an SSH client and its server: it counts the bytes that the server sends, and can stop or
break there."""

from __future__ import annotations

import contextlib
import socket
import threading


class CutLink:
    """Listens on `port` and forwards to the server's. `received`: bytes from the server, since it was set to
    0.

    Once that many bytes were forwarded: with `cut_at` the connections break, with `hold_at` they stop until
    `release`. Where `held` is set, nothing that the client sends gets through either.
    """

    def __init__(self, server: int) -> None:
        self.received = 0
        self.cut_at: int | None = None
        self.hold_at: int | None = None
        self.held = threading.Event()
        self._released = threading.Event()
        self._server = server
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._sockets: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def release(self) -> None:
        self.hold_at = None
        self._released.set()

    def close(self) -> None:
        self._released.set()
        self._listener.close()
        self._break()

    def _break(self) -> None:
        # Taken first: the client connects again as soon as one of them is closed.
        sockets, self._sockets = self._sockets, []
        for one in sockets:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection(("127.0.0.1", self._server))
                self._sockets += [client, server]
                threading.Thread(target=self._forward, args=(client, server), daemon=True).start()
                threading.Thread(target=self._back, args=(server, client), daemon=True).start()

    def _forward(self, client: socket.socket, server: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := client.recv(1 << 16):
                if self.held.is_set():
                    self._released.wait(60)
                server.sendall(data)
        with contextlib.suppress(OSError):
            server.shutdown(socket.SHUT_WR)

    def _back(self, server: socket.socket, client: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := server.recv(1 << 16):
                self.received += len(data)
                if self.hold_at is not None and self.received >= self.hold_at:
                    self.held.set()
                    self._released.wait(60)
                client.sendall(data)
                if self.cut_at is not None and self.received >= self.cut_at:
                    self.cut_at = None
                    self._break()
        with contextlib.suppress(OSError):
            client.shutdown(socket.SHUT_WR)
