"""`logs`: the lines of a job's ranks, those that the user selects."""

from __future__ import annotations

import json
import re
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass

from cloudddp import timings
from cloudddp.agent.client import Runner
from cloudddp.agent.protocol import LAUNCHER_RANK, SETUP_RANK
from cloudddp.agent.protocol.jobs import MAX_RANKS
from cloudddp.agent.protocol.phases import MAX_RANK
from cloudddp.cli.actions.follow import follower_of, is_note, line_printer, report_end
from cloudddp.cli.console import Console
from cloudddp.cli.session import Session, start_session
from cloudddp.cli.views.jobs import stalled
from cloudddp.cluster.model import Cluster
from cloudddp.config.values import seconds_of
from cloudddp.errors import NodeError, UsageError, q
from cloudddp.job import status
from cloudddp.job.follow.stream import LogSelection, SetupLogs
from cloudddp.job.follow.verdict import JobResult
from cloudddp.job.status import JobRecord
from cloudddp.operations import deadlines
from cloudddp.operations.node_connections import reachable
from cloudddp.text import node_list

MOST_TAIL = 1_000_000  # lines of each rank
_START_SECONDS = 120.0  # between the setup of a job and its start; a launch that was killed does not start it
_AGAIN = 1.0  # seconds between two looks at a job in its setup

Printer = Callable[[int, int, str], None]


@dataclass(frozen=True, slots=True)
class LogFilter:
    """What the user selects. Empty `ranks` and `nodes` mean all."""

    ranks: frozenset[int]
    nodes: frozenset[int]
    since: float | None  # seconds
    tail: int | None
    pattern: re.Pattern[str] | None
    follow: bool
    as_json: bool
    raw: bool

    def has(self, node: int, rank: int) -> bool:
        return (not self.ranks or rank in self.ranks or rank in (LAUNCHER_RANK, SETUP_RANK)) and (
            not self.nodes or node in self.nodes
        )

    def selection(self, *, launcher: bool) -> LogSelection:
        """Return what to read. To follow, all ranks: a failed one is reported with its last lines."""
        # A request cannot name more; the others are read and not shown.
        few = 0 < len(self.ranks) < MAX_RANKS and not self.follow
        ranks = self.ranks | ({LAUNCHER_RANK} if launcher else set()) if few else frozenset[int]()
        tail = self.tail if self.pattern is None else None
        return LogSelection(tuple(sorted(ranks)), self.since, tail, setup=not self.ranks)


def logs(
    console: Console,
    *,
    job_id: str | None,
    follow: bool,
    only: Sequence[str],
    nodes: Sequence[str],
    since: str | None,
    grep: str | None,
    tail: str | None,
    as_json: bool,
    raw: bool,
) -> int:
    wanted = LogFilter(
        ranks=_numbers("--rank", only, MAX_RANK),
        nodes=_numbers("--node", nodes, MAX_RANK),
        since=None if since is None else _age(since),
        tail=None if tail is None else _tail(tail),
        pattern=None if grep is None else _pattern(grep),
        follow=follow,
        as_json=as_json,
        raw=raw,
    )
    if raw and as_json:
        raise UsageError("--raw and --json exclude each other", hint="JSON has every character of the log")
    if follow and tail is not None and grep is not None:
        hint = (
            "-f --grep shows the lines that match, from the beginning of the log; --since limits how far back"
        )
        raise UsageError("with -f, --tail and --grep exclude each other", hint=hint)
    session = start_session(console)
    with reachable(session) as (cluster, runner):
        record = status.find_job(runner, job_id)
        _check_selected(wanted, record, cluster)
        show = _printer(console, wanted)
        if follow and record.status == "setup":
            record, show = _after_setup(runner, record, wanted, show)
        last = _LastLines(wanted, show, follow=follow)
        if follow:
            _report_stall(console, record)
        finished = _read(session, runner, cluster, record, wanted, last.add)
        if not follow:
            last.flush()
            _refuse_incomplete(finished)
            _report_stall(console, record)
            if record.status == "setup":
                console.suggest(
                    f"job {record.id} is still in its setup: `cloudddp logs -f {q(record.id)}` follows it, "
                    f"`cloudddp cancel {q(record.id)}` ends it"
                )
            return 0
        report_end(session, runner, cluster, finished)
        if finished.leaving is not None:
            console.suggest(f"before the nodes end: `cloudddp pull --all-nodes --job {q(record.id)}`")
        return finished.exit_code


def _read(
    session: Session, runner: Runner, cluster: Cluster, record: JobRecord, wanted: LogFilter, show: Printer
) -> JobResult:
    """Pass each line of the logs to `show`: those until now, or with `follow` all until the job ends."""
    console, follow = session.console, wanted.follow
    nodes = record.nodes if follow or not wanted.nodes else wanted.nodes
    selection = wanted.selection(launcher=console.options.verbose)
    more = {"wait": follow, "bars": follow and not wanted.as_json, "on_line": show, "selection": selection}
    follower = follower_of(session, runner, cluster, record.id, nodes, **more)
    warnings = deadlines.warnings(console, cluster if follow else None, session.settings)
    with closing(follower), timings.span("logs"), warnings:
        try:
            return follower.run()
        except KeyboardInterrupt:
            console.suggest(f"the job keeps running; `cloudddp cancel {q(record.id)}` ends it")
            raise


class _LastLines:
    """Passes the selected lines on; where --tail counts lines that match, at the end."""

    def __init__(self, wanted: LogFilter, show: Printer, *, follow: bool) -> None:
        self._wanted = wanted
        self._show = show
        self._count = None if follow or wanted.pattern is None else wanted.tail
        self._kept: dict[tuple[int, int], deque[str]] = {}

    def add(self, node: int, rank: int, line: str) -> None:
        wanted = self._wanted
        if not wanted.has(node, rank) or (wanted.pattern and not wanted.pattern.search(line)):
            return
        if self._count is None:
            self._show(node, rank, line)
        else:
            self._kept.setdefault((node, rank), deque(maxlen=self._count)).append(line)

    def flush(self) -> None:
        for (node, rank), lines in sorted(self._kept.items()):
            for line in lines:
                self._show(node, rank, line)


def _printer(console: Console, wanted: LogFilter) -> Printer:
    launcher = console.options.verbose
    if not wanted.as_json:
        return line_printer(console, launcher=launcher, raw=wanted.raw)

    def show(node: int, rank: int, line: str) -> None:
        if rank != LAUNCHER_RANK or launcher or is_note(line):
            value = {"node": node, "rank": None if rank < 0 else rank, "line": line}
            if rank == SETUP_RANK:
                value["setup"] = True
            console.print(json.dumps(value))

    return show


def _report_stall(console: Console, record: JobRecord) -> None:
    """Report that a job that runs does nothing, which was left alone."""
    if record.stalled is not None:
        console.log(stalled(record.id, record.stalled))


def _refuse_incomplete(finished: JobResult) -> None:
    """Raise NodeError if the logs of some node were not read to their end."""
    if not finished.lost:
        return
    reasons = [
        reason.removeprefix(f"node {node}: ")
        for node, reason in zip(finished.lost, finished.lost_reasons, strict=True)
    ]
    if len(reasons) > 1:
        reasons = [f"node {node}: {reason}" for node, reason in zip(finished.lost, reasons, strict=True)]
    raise NodeError(
        f"cannot read all logs of {node_list(finished.lost)}: {'; '.join(reasons)}",
        hint="repeat the command; `cloudddp status` shows the nodes",
    )


def _after_setup(
    runner: Runner, record: JobRecord, wanted: LogFilter, show: Printer
) -> tuple[JobRecord, Printer]:
    """Show the output of a job's setup until that has ended. Return the job as it is then, and a printer that
    does not repeat what was shown."""
    shown: Counter[int] = Counter()  # lines of the setup, by node

    def count(node: int, rank: int, line: str) -> None:
        shown[node] += 1
        show(node, rank, line)

    def once(node: int, rank: int, line: str) -> None:
        if rank == SETUP_RANK and shown[node]:
            shown[node] -= 1
        else:
            show(node, rank, line)

    last = _LastLines(wanted, count, follow=True)
    setup = SetupLogs(runner, record.id, lambda node, line: last.add(node, SETUP_RANK, line))
    job, seen = record, time.monotonic()
    while True:
        setup.read(job.nodes)
        if job.status != "setup" or time.monotonic() - seen > _START_SECONDS:
            return job, once
        time.sleep(_AGAIN)
        found = [one for one in status.list_jobs(runner) if one.id == record.id]
        if found:  # between its setup and its start the nodes do not list it
            job, seen = found[0], time.monotonic()


def _check_selected(wanted: LogFilter, record: JobRecord, cluster: Cluster) -> None:
    """Raise UsageError for a node on which the job does not run, and for a rank that it does not have, if
    every node has reported how many it runs."""
    hint = f"it runs on {node_list(record.nodes)}"
    for node in sorted(wanted.nodes - set(record.nodes)):
        raise UsageError(f"job {record.id} has no node {node}", hint=hint)
    known = not cluster.missing and set(record.nodes) == set(cluster.nodes)
    hint = "its only rank is 0" if record.ranks == 1 else f"its ranks are 0 to {record.ranks - 1}"
    for rank in sorted(rank for rank in wanted.ranks if rank >= record.ranks) if known else ():
        raise UsageError(f"job {record.id} has no rank {rank}", hint=hint)


# -- options -----------------------------------------------------------------------------------------------


def _numbers(option: str, values: Sequence[str], most: int) -> frozenset[int]:
    """Return the numbers of lists such as `3,8-15`. Raises UsageError."""
    found: set[int] = set()
    for value in values:
        for part in value.split(","):
            match = re.fullmatch(r"\s*([0-9]{1,9})(?:-([0-9]{1,9}))?\s*", part, re.ASCII)
            low, high = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
            if not low <= high <= most:
                hint = f"for example {option} 3 or {option} 3,8-15"
                raise UsageError(f"{option} {value!r} is not a list of numbers", hint=hint)
            found.update(range(low, high + 1))
    return frozenset(found)


def _age(text: str) -> float:
    seconds = seconds_of(text) if len(text) < 10 else 0.0
    if not seconds:
        raise UsageError(f"--since {text[:40]!r} is not a time", hint="for example --since 90s, 5m, 2h or 1d")
    return seconds


def _tail(text: str) -> int:
    if not re.fullmatch(r"[0-9]{1,7}", text, re.ASCII) or int(text) > MOST_TAIL:
        hint = f"allowed: a whole number from 0 to {MOST_TAIL}"
        raise UsageError(f"--tail {text[:40]!r} is not a number of lines", hint=hint)
    return int(text)


def _pattern(text: str) -> re.Pattern[str]:
    try:
        return re.compile(text)
    except (re.error, RecursionError, OverflowError) as error:
        raise UsageError(
            f"--grep {text[:80]!r} is not a regular expression: {error}",
            hint="see docs.python.org/library/re; put a \\ before a character that is meant literally",
        ) from None
