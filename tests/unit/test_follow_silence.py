"""Progress bars, silence and gaps in the state of a job that is followed."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.jobstates import followed, job, lost, rank

from cloudddp.agent.protocol.progress import TrainingStatus
from cloudddp.cli.actions.follow import silence_reporter
from cloudddp.cli.console import Console
from cloudddp.config.timing import Timing
from cloudddp.job.follow.decide import silence_due
from cloudddp.job.follow.events import BarsDue, Event, JobUpdate, LogData, NodeQuiet, Silence
from cloudddp.job.follow.state import FollowState, Line

TIMING = replace(Timing(), bars=5.0, no_output=60.0)


def due(state: FollowState, now: float) -> list[Event]:
    return list(silence_due(state, TIMING, now))


def test_last_state_of_a_progress_bar_is_shown_once() -> None:
    state = followed([LogData(0, 2, b"\r 10%\r 20%")])
    assert due(state, 4.9) == []
    assert due(state, 5.0) == [BarsDue()]
    shown = state.apply(BarsDue(), 5.0)
    assert shown.lines == (Line(0, 2, " 20%", bar=True),)
    assert shown.nodes[0].logs[2].tail == ()
    assert due(shown, 9.9) == []
    assert shown.apply(BarsDue(), 10.0).lines == ()  # it has not changed
    later = shown.apply(LogData(0, 2, b"\r 30%"), 6.0)
    assert later.apply(BarsDue(), 10.0).lines == (Line(0, 2, " 30%", bar=True),)
    assert later.apply(LogData(0, 2, b"\r100%\n"), 7.0).lines == (Line(0, 2, "100%"),)


def test_line_that_nothing_overwrites_is_not_a_bar() -> None:
    state = followed([LogData(0, 0, b"epoch 1 ... ")])
    assert due(state, 30.0) == []
    assert state.apply(BarsDue(), 30.0).lines == ()


def test_silence_is_reported_every_minute_until_there_is_output() -> None:
    training = TrainingStatus(reported=1.0, step=120)
    state = followed([LogData(1, 2, b"x\n"), JobUpdate(0, job("running", rank(0), training=training))])
    assert due(state, 59.0) == []
    assert due(state, 60.0) == [Silence(60.0, 2, "step 120")]
    again = state.apply(Silence(60.0, 2, "step 120"), 60.0)
    assert due(again, 119.0) == []
    assert due(again, 125.0) == [Silence(125.0, 2, "step 120")]
    assert due(again.apply(LogData(0, 0, b"y"), 125.0), 126.0) == []


def test_silence_since_the_start_names_no_rank() -> None:
    assert due(followed([LogData(0, -1, b"from torchrun\n")]), 61.0) == [Silence(61.0, None, "")]


@pytest.mark.parametrize("event", [NodeQuiet(1), lost(0)])
def test_silence_is_not_reported_where_a_node_is_the_reason(event: Event) -> None:
    nodes = 2 if isinstance(event, NodeQuiet) else 1
    assert due(followed([LogData(0, 0, b"x"), event], nodes=nodes), 500.0) == []


def test_silence_in_words(capsys: pytest.CaptureFixture[str]) -> None:
    for silent in (Silence(125.0, 2, "step 120"), Silence(30.0, None, "")):
        silence_reporter(Console(), "job-1")(silent)
    where = ". `cloudddp stacks job-1` shows where each rank is"
    assert capsys.readouterr().err.splitlines() == [
        f"no output from any rank for 2 min; rank 2 was the last (step 120){where}",
        f"no output from any rank for 30 s since the job was started{where}",
    ]
