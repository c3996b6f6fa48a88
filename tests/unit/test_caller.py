"""The address of this computer, asked from a real server."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from typing import Any

import pytest
from support.web import Handler, Server

from cloudddp.aws.caller import caller_block, owner_of
from cloudddp.errors import CloudDDPError


class Service(Server):
    """Answers with the caller's address, or with a fixed text; listens on both families."""

    address_family = socket.AF_INET6
    text = ""

    def server_bind(self) -> None:
        self.socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        super().server_bind()


class Answers(Handler, BaseHTTPRequestHandler):
    server: Service

    def do_GET(self) -> None:
        text = self.server.text or str(self.client_address[0]).removeprefix("::ffff:")
        self.answer(200, text + "\n")


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> Iterator[Service]:
    try:
        server = Service(Answers, ("::", 0))
    except OSError:
        pytest.skip("this computer has no IPv6")
    monkeypatch.setenv("CLOUDDDP_CHECKIP_URL", f"http://localhost:{server.server_port}/")
    yield server
    server.close()


def test_address_is_asked_over_ipv4(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    """checkip.amazonaws.com has addresses of both families, and resolvers return the IPv6 one first."""
    resolve = socket.getaddrinfo

    def both(host: str, *more: Any, **options: Any) -> Any:
        if host != "both.test":
            return resolve(host, *more, **options)
        family = more[1] if len(more) > 1 else options.get("family", 0)
        addresses = {socket.AF_INET6: "::1", socket.AF_INET: "127.0.0.1"}
        kinds = [kind for kind in addresses if family in (0, kind)]
        return [
            item for kind in kinds for item in resolve(addresses[kind], *more[:1], type=socket.SOCK_STREAM)
        ]

    monkeypatch.setattr(socket, "getaddrinfo", both)
    monkeypatch.setenv("CLOUDDDP_CHECKIP_URL", f"http://both.test:{service.server_port}/")
    assert caller_block() == "127.0.0.1/32"


@pytest.mark.parametrize("text", ["2001:db8::7", "no address", "203.0.113.300"])
def test_answer_that_is_no_ipv4_address_is_refused(service: Service, text: str) -> None:
    service.text = text
    with pytest.raises(CloudDDPError, match="cannot find the address of this computer") as refused:
        caller_block()
    assert "--ssh-from" in str(refused.value.hint)


def test_service_over_ipv6_only_is_refused(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CLOUDDDP_CHECKIP_URL", f"http://[::1]:{service.server_port}/")
    with pytest.raises(CloudDDPError, match="cannot find the address of this computer"):
        caller_block()


@pytest.mark.parametrize(
    ("end", "owner"),
    [
        ("assumed-role/Dev/botocore-session-1700000000", "assumed-role/Dev"),
        ("assumed-role/Dev/alice@example.org", "assumed-role/Dev/alice@example.org"),
        ("user/alice", "user/alice"),
        ("root", "root"),
    ],
)
def test_generated_session_name_is_not_part_of_the_owner(end: str, owner: str) -> None:
    assert owner_of({"Arn": f"arn:aws:sts::123456789012:{end}"}) == owner
