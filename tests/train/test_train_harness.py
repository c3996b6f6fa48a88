"""The harness itself: what the tests of `train/` rely on."""

from __future__ import annotations

import signal
import socket
import sys

import pytest
import train_harness as harness


def test_a_process_of_the_zygote_can_be_ended_and_read_as_soon_as_it_is_started(
    zygote: harness.Zygote,
) -> None:
    for _ in range(20):
        run = zygote.start("--help")
        run.kill_session()
        assert run.wait() in (0, -signal.SIGKILL)
        assert "Traceback" not in run.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere ports are not kept")
def test_a_free_port_comes_to_nobody_by_chance_and_who_is_told_it_can_listen_there() -> None:
    port = harness.free_port()
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind(("127.0.0.1", port))
    assert not harness.listening(port)
    with socket.socket() as store:
        store.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as torch does
        store.bind(("", port))
        store.listen()
        assert harness.listening(port)
