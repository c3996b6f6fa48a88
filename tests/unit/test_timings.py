"""The waterfall of `--timings`, from spans."""

from __future__ import annotations

import threading

from cloudddp import timings
from cloudddp.timings import Row, Span, rows, waterfall


def test_spans_of_several_nodes_are_one_line_each_time() -> None:
    spans = [
        Span("probe", 1.0, 2.0, node=0),
        Span("probe", 1.1, 3.0, node=1),
        Span("start", 3.0, 3.5, node=0),
        Span("probe", 4.0, 5.0, node=0),
        Span("AWS", 0.0, 0.5),
    ]
    assert rows(spans) == [
        Row("AWS", 0.0, 0.5),
        Row("probe", 1.0, 3.0, nodes=2, slowest=1),
        Row("start", 3.0, 3.5, nodes=1, slowest=0),
        Row("probe", 4.0, 5.0, nodes=1, slowest=0),
    ]


def test_spans_of_nodes_with_a_pause_between_them_are_two_rows() -> None:
    spans = [Span("pack", 0.0, 9.0, 0), Span("pulled", 1.0, 1.2, 1), Span("pulled", 9.0, 9.1, 0)]
    assert rows(spans) == [
        Row("pack", 0.0, 9.0, nodes=1, slowest=0),
        Row("pulled", 1.0, 1.2, nodes=1, slowest=1),
        Row("pulled", 9.0, 9.1, nodes=1, slowest=0),
    ]


def test_lines_have_begin_length_name_and_a_bar_to_scale() -> None:
    head, first, second, last = waterfall(
        [Row("a", 10.0, 11.0), Row("b", 11.0, 14.0, nodes=2, slowest=1), Row("first line", 14.0, 14.0)]
    ).splitlines()
    assert head.split() == ["begin", "took", "(seconds)"]
    assert first.split() == ["0.000", "1.000", "a", "#" * 5]
    assert second.startswith(" 1.000  3.000  b (2 nodes, slowest 1)")
    assert second.endswith(f" {'#' * 15}")
    assert second.index("#") - first.index("#") == 5
    assert len(second) == 80
    assert last.split() == ["4.000", "0.000", "first", "line", "#"]


def test_a_long_list_of_lines_is_cut() -> None:
    assert waterfall([Row("call", float(k), k + 1.0) for k in range(1000)]).splitlines()[-1] == "and 800 more"


def test_nothing_is_recorded_while_it_is_off() -> None:
    with timings.span("one"):
        timings.mark("two")
    assert timings.finish() == ""


def test_a_span_is_recorded_also_when_its_block_fails_and_in_any_thread() -> None:
    def work() -> None:
        with timings.span("in a thread", node=3):
            pass

    timings.enable()
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    try:
        with timings.span("fails"):
            raise ValueError
    except ValueError:
        timings.mark("first line")
        timings.mark("first line")
    names = [line.split(None, 2)[2].rstrip(" #") for line in timings.finish().splitlines()[1:]]
    assert names == [
        "total",
        "start of Python",
        "imports: command line",
        "in a thread",
        "fails",
        "first line",
    ]
    assert timings.finish() == ""
