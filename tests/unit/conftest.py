"""One SSH server and a connection to it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.sshserver import Server, Site

from cloudddp.ssh.connection import Connection


@pytest.fixture
def server(ssh_site: Site) -> Server:
    return ssh_site.server()


@pytest.fixture
def connection(ssh_site: Site, server: Server) -> Iterator[Connection]:
    opened = Connection.open(ssh_site.target(server.port))
    yield opened
    opened.close()
