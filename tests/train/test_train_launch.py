"""The support code that the tests of `train/` rely on."""

from __future__ import annotations

import signal
import socket
import sys

import pytest

pytest.importorskip("torch")

from support.training import launch


def test_run_can_be_killed_as_soon_as_it_is_started() -> None:
    for _ in range(20):
        run = launch.start_train("--lr", "-1")
        run.kill_session()
        assert run.wait() in (2, -signal.SIGKILL)
        assert "Traceback" not in run.stderr


def test_exit_of_a_forked_program_closes_no_descriptor_of_others() -> None:
    """Otherwise gloo hangs or crashes, if its epoll descriptor has the number of one of the zygote's."""
    run = launch.run(launch.CHECKS / "open_descriptors.py")
    assert (run.code, run.stdout.splitlines()[-1]) == (0, "all open"), run.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="ports are not reserved elsewhere")
def test_free_port_is_reserved_but_can_be_listened_on() -> None:
    port = launch.free_port()
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind(("127.0.0.1", port))
    assert not launch.is_listening(port)
    with socket.socket() as store:
        store.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        store.bind(("", port))
        store.listen()
        assert launch.is_listening(port)
