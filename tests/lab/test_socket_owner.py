"""The owner of the other end of a connection: netlink and the tables in /proc agree."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator

import pytest
from support.harness import cannot

from cloudddp.simulator.linux.socket_owner import Address, SocketOwners

STRANGER = 54321


@pytest.fixture
def server() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield listening


@pytest.fixture
def owners() -> SocketOwners:
    return SocketOwners()


def port_of(connected: socket.socket) -> Address:
    return "127.0.0.1", connected.getsockname()[1]


def agreed(owners: SocketOwners, peer: Address, server: Address) -> int | None:
    """Return what both ways of looking find."""
    found = owners.ask_kernel(peer, server)
    assert list(owners.search_tables(peer, server)) == ([] if found is None else [found])
    return found


def test_own_connection_is_own(owners: SocketOwners, server: socket.socket) -> None:
    with socket.create_connection(server.getsockname()) as connected:
        assert agreed(owners, port_of(connected), server.getsockname()) == os.getuid()
        assert owners.is_own(port_of(connected), server=server.getsockname())


def test_connection_of_an_ipv6_socket_is_found(owners: SocketOwners, server: socket.socket) -> None:
    with socket.socket(socket.AF_INET6) as connected:
        connected.connect(("::ffff:127.0.0.1", server.getsockname()[1]))
        assert agreed(owners, port_of(connected), server.getsockname()) == os.getuid()


def test_unknown_peer_and_listening_socket_are_not_own(owners: SocketOwners, server: socket.socket) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        for peer in (("127.0.0.1", 1), other.getsockname()):
            assert agreed(owners, peer, server.getsockname()) is None
            assert not owners.is_own(peer, server=server.getsockname())


def test_ended_connection_belongs_to_nobody(owners: SocketOwners, server: socket.socket) -> None:
    with socket.create_connection(server.getsockname()) as connected:
        peer = port_of(connected)
        accepted, _ = server.accept()
    with accepted:
        accepted.recv(1)
    assert agreed(owners, peer, server.getsockname()) is None  # it is in TIME_WAIT


def test_connection_of_another_user_is_not_own(owners: SocketOwners, server: socket.socket) -> None:
    if os.getuid():
        cannot("only root can give a socket to another user")
    with socket.create_connection(server.getsockname()) as connected:
        os.fchown(connected.fileno(), STRANGER, STRANGER)
        assert agreed(owners, port_of(connected), server.getsockname()) == STRANGER
        assert not owners.is_own(port_of(connected), server=server.getsockname())


def test_tables_are_read_where_the_kernel_has_no_answer(owners: SocketOwners, server: socket.socket) -> None:
    """As on a kernel without inet_diag, which replies as for an unknown socket."""
    assert owners._netlink is not None
    owners._netlink.close()
    with socket.create_connection(server.getsockname()) as connected:
        assert owners.ask_kernel(port_of(connected), server.getsockname()) is None
        assert owners.is_own(port_of(connected), server=server.getsockname())
