"""Who may talk to the simulator's API: the user who started it, by a program.

Loopback is open to every user of the machine, and to every web page that this user looks at. Others' connections are
closed before a thread or a byte is spent on them; requests that a web page makes the user's browser send get 403.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterable
from typing import Any

from werkzeug.serving import ThreadedWSGIServer, WSGIRequestHandler

from cloudddp.sim.peers import Network, Socket

Environ = dict[str, Any]
Start = Callable[..., Any]
Application = Callable[[Environ, Start], Iterable[bytes]]


class Door(ThreadedWSGIServer):
    """A server of `application` on a listening socket, which is on `network`."""

    def __init__(
        self,
        application: Application,
        listener: socket.socket,
        network: Network,
        handler: type[WSGIRequestHandler],
    ) -> None:
        self._network = network
        self._address: Socket = listener.getsockname()
        host, port = self._address
        super().__init__(host, port, _guard(application, self._address), handler, fd=listener.fileno())

    def verify_request(self, _request: Any, client_address: Any) -> bool:
        """Whether the connection is ours; socketserver's hook, called before a thread is made for it."""
        return self._network.is_ours(client_address, door=self._address)


def _guard(application: Application, address: Socket) -> Application:
    names = {f"{host}:{address[1]}" for host in ("127.0.0.1", "localhost")}

    def answer(environ: Environ, start_response: Start) -> Iterable[bytes]:
        if _is_strange_page(environ, names):
            return _refuse(start_response, "the simulator takes nothing from web pages\n")
        return application(environ, start_response)

    return answer


def _is_strange_page(environ: Environ, names: set[str]) -> bool:
    """Whether a browser sends this for a page that is not ours.

    A page of any site may send requests here (`Origin` and `Sec-Fetch-Site` tell), and one whose name has been
    pointed at 127.0.0.1 even reads the answers (`Host` tells).
    """
    origin, site = environ.get("HTTP_ORIGIN"), environ.get("HTTP_SEC_FETCH_SITE")
    return (
        environ.get("HTTP_HOST", next(iter(names))) not in names
        or (origin is not None and origin.removeprefix("http://") not in names)
        or site not in (None, "none", "same-origin")
    )


def _refuse(start_response: Start, text: str) -> Iterable[bytes]:
    body = text.encode()
    start_response("403 Forbidden", [("Content-Type", "text/plain"), ("Content-Length", str(len(body)))])
    return [body]
