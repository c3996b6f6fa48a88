"""Who may talk to the simulator's API: the user who started it, by a program. WSGI on both sides.

Loopback is open to every user of the machine, and to every web page that this user looks at.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any
from urllib.parse import urlsplit

from cloudddp.sim.peers import Network, Socket

Environ = dict[str, Any]
Start = Callable[..., Any]
Application = Callable[[Environ, Start], Iterable[bytes]]


def guard(application: Application, network: Network, address: Socket) -> Application:
    """The application, as it answers at a door (an address of `network`); others get 403 and a word."""
    names = {f"{host}:{address[1]}" for host in ("127.0.0.1", "localhost")}

    def answer(environ: Environ, start_response: Start) -> Iterable[bytes]:
        peer = environ["REMOTE_ADDR"], int(environ["REMOTE_PORT"])
        if not network.is_ours(peer, door=address):
            return _refuse(start_response, "another user's simulator\n")
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
        or (origin is not None and urlsplit(origin).netloc not in names)
        or site not in (None, "none", "same-origin")
    )


def _refuse(start_response: Start, text: str) -> Iterable[bytes]:
    body = text.encode()
    start_response("403 Forbidden", [("Content-Type", "text/plain"), ("Content-Length", str(len(body)))])
    return [body]
