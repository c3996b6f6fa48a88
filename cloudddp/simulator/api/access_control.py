"""Who may use the simulator's API: programs of the user who started it.

Every user of the computer can connect to a loopback address, and so can every web page that the user opens.
Connections of other users are closed before a thread is started for them; requests that a web page makes get
403.
"""

from __future__ import annotations

import socket
from collections.abc import Iterable
from typing import Any

from werkzeug.serving import ThreadedWSGIServer, WSGIRequestHandler

from cloudddp.simulator.api.wsgi import Application, Environ, StartResponse, respond
from cloudddp.simulator.linux.socket_owner import Address, SocketOwners


class GuardedServer(ThreadedWSGIServer):
    """Serves `application` on a listening socket. `owners` looks up the owners of its connections."""

    def __init__(
        self,
        application: Application,
        listener: socket.socket,
        owners: SocketOwners,
        handler: type[WSGIRequestHandler],
    ) -> None:
        self._owners = owners
        self._address: Address = listener.getsockname()
        host, port = self._address
        super().__init__(host, port, _reject_web_pages(application, port), handler, fd=listener.fileno())

    def verify_request(self, _request: Any, client_address: Any) -> bool:
        """Hook of socketserver, called before a thread is started for the connection."""
        return self._owners.is_own(client_address, server=self._address)


def _reject_web_pages(application: Application, port: int) -> Application:
    own_hosts = {f"{host}:{port}" for host in ("127.0.0.1", "localhost")}

    def serve(environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        if _is_from_web_page(environ, own_hosts):
            message = "the simulator does not accept requests from web pages\n"
            return respond(start_response, 403, "text/plain", message)
        return application(environ, start_response)

    return serve


def _is_from_web_page(environ: Environ, own_hosts: set[str]) -> bool:
    """Return whether a browser sends this for a page of another site.

    A page of any site can send requests here (`Origin` and `Sec-Fetch-Site` show it), and a site whose name
    resolves to 127.0.0.1 can also read the responses (`Host` shows it).
    """
    origin, site = environ.get("HTTP_ORIGIN"), environ.get("HTTP_SEC_FETCH_SITE")
    return (
        environ.get("HTTP_HOST", next(iter(own_hosts))) not in own_hosts
        or (origin is not None and origin.removeprefix("http://") not in own_hosts)
        or site not in (None, "none", "same-origin")
    )
