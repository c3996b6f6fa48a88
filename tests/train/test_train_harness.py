"""The harness itself: what the tests of `train/` rely on."""

from __future__ import annotations

import signal

import train_harness as harness


def test_a_process_of_the_zygote_can_be_ended_and_read_as_soon_as_it_is_started(
    zygote: harness.Zygote,
) -> None:
    for _ in range(20):
        run = zygote.start("--help")
        run.kill_session()
        assert run.wait() in (0, -signal.SIGKILL)
        assert "Traceback" not in run.stderr
