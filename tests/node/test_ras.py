"""NCCL's RAS: a server that speaks its protocol, with the answers of NCCL's documentation."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator

import pytest
from support.agentnode import environ

from agent.watch import ras

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the agent needs /proc")

HEAD = """Communicators... (0.00s)
=============

Group     Comms     Nodes     Ranks     Ranks     Ranks    Status  Errors
    #  in group  per comm  per node  per comm  in group
    0         1         4         8        32        32   RUNNING      OK
"""
FINE = f"""{HEAD}
Errors
======

Warnings
========

"""
# NCCL's documentation, "RAS", 2.24 to 2.29, and the formats of src/ras/client_support.cc.
MISMATCH = f"""{HEAD}
Errors
======

Warnings
========

#0-0 (27a079b828ff1a75) MISMATCH
  Communicator ranks have different collective operation counts
  30 ranks have launched up to operation 6650
  2 ranks have launched up to operation 6649
  Rank 0 -- GPU 0 managed by process 483072 on node 172.16.64.210
  Rank 7 -- GPU 7 managed by process 483079 on node 172.16.64.210
"""
OLD_INCOMPLETE = f"""{HEAD}
Errors
======

INCOMPLETE
  Missing communicator data from 1 job process
  Process 3487984 on node 172.16.64.213 managing GPU 5

#0-0 (cf264af53edbe986) INCOMPLETE
  Missing communicator data from 1 rank
  The missing rank: 21

Warnings
========

TIMEOUT
  Encountered 2 communication timeouts while gathering communicator data
"""
ERROR = f"""{HEAD}
Errors
======

#0-0 (cf264af53edbe986) ERROR
  Asynchronous error on 1 rank
  Rank 3 reported Unhandled system error -- GPU 3 managed by process 9 on node 172.16.64.213

#1-0 (cf264af53edbe987) ERROR
  Initialization errors on 2 ranks
  2 ranks reported Remote process exited

Warnings
========
"""


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (FINE, "no rank is missing, and none is behind"),
        (
            MISMATCH,
            "#0-0 (27a079b828ff1a75) MISMATCH; "
            "Communicator ranks have different collective operation counts; "
            "30 ranks have launched up to operation 6650; 2 ranks have launched up to operation 6649; "
            "Rank 0; Rank 7",
        ),
        (
            OLD_INCOMPLETE,
            "INCOMPLETE; Missing communicator data from 1 job process; "
            "Process 3487984 on node 172.16.64.213 managing GPU 5; "
            "#0-0 (cf264af53edbe986) INCOMPLETE; Missing communicator data from 1 rank; "
            "The missing rank: 21; "
            "TIMEOUT; Encountered 2 communication timeouts while gathering communicator data",
        ),
        (
            ERROR,
            "#0-0 (cf264af53edbe986) ERROR; Asynchronous error on 1 rank; "
            "Rank 3 reported Unhandled system error; "
            "#1-0 (cf264af53edbe987) ERROR; Initialization errors on 2 ranks; "
            "2 ranks reported Remote process exited",
        ),
        ("", ""),
    ],
)
def test_report_in_a_sentence(text: str, sentence: str) -> None:
    assert ras.summary(text) == (sentence and f"NCCL RAS: {sentence}")


def test_sentence_of_a_long_report_is_short() -> None:
    many = "".join(f"  Rank {rank} -- GPU 0\n" for rank in range(20_000))
    assert len(ras.summary(HEAD + ras.ERRORS + many)) == ras.MAX_SENTENCE


@contextlib.contextmanager
def serving(serve: Callable[[socket.socket], None]) -> Iterator[int]:
    """Run a server for one connection; yield its port."""

    def run() -> None:
        with contextlib.suppress(OSError):
            connection, _ = listener.accept()
            with connection:
                serve(connection)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        yield listener.getsockname()[1]
    thread.join(20)


def nccl(connection: socket.socket) -> None:
    """The dialogue of NCCL's client_support.cc."""
    with connection.makefile("rwb") as lines:
        for line in lines:
            word = line.strip().lower()
            if word.startswith(b"timeout "):
                lines.write(b"OK\n")
            elif word == b"verbose status":
                lines.write(MISMATCH.encode())
                return
            else:
                lines.write(b"ERROR: Unknown command\n")
            lines.flush()


def garbage(connection: socket.socket) -> None:
    connection.recv(100)
    connection.sendall(b"220 mail.example.com ESMTP\r\n" * 1000)


def endless(connection: socket.socket) -> None:
    connection.recv(100)
    connection.sendall(f"OK\n{HEAD}{ras.ERRORS}".encode())
    with contextlib.suppress(OSError):
        while True:
            connection.sendall(b"x" * (1 << 16))


def test_report_is_asked_for() -> None:
    with serving(nccl) as port:
        assert ras.ask("127.0.0.1", port) == MISMATCH


def test_other_servers_are_left() -> None:
    with serving(garbage) as port:
        assert ras.ask("127.0.0.1", port) == ""
    assert ras.ask("127.0.0.1", port) == ""  # refused
    assert ras.ask("127.0.0.1", 1 << 20) == ""


def test_answer_is_bounded_in_bytes_and_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(endless) as port:
        assert ras.MAX_BYTES - 10 <= len(ras.ask("127.0.0.1", port)) <= ras.MAX_BYTES + (1 << 16)
    monkeypatch.setattr(ras, "SECONDS", 0.3)
    release = threading.Event()
    with serving(lambda _: release.wait(10) and None) as port:
        began = time.monotonic()
        assert ras.ask("127.0.0.1", port) == ""
        assert time.monotonic() - began < 5
        release.set()


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("10.0.0.7:4000", ("10.0.0.7", 4000)),
        ("[::1]:4000", ("::1", 4000)),
        (":4000", ("localhost", 4000)),
        ("nonsense", ("localhost", 28028)),
        (None, ("localhost", 28028)),
    ],
)
def test_address_is_that_of_the_rank(value: str | None, expected: tuple[str, int]) -> None:
    env = os.environ if value is None else {**os.environ, "NCCL_RAS_ADDR": value}
    with subprocess.Popen(["sleep", "60"], env=env) as rank:
        environ(rank.pid)
        found = ras.address(rank.pid)
        rank.kill()
    assert found == expected
    assert ras.address(0) == ("localhost", 28028)
