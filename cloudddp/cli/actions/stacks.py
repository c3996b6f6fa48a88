"""`stacks`."""

from __future__ import annotations

from collections.abc import Mapping

from cloudddp.agent.protocol.stacks import RankStack, summary
from cloudddp.cli import session as sessions
from cloudddp.cli.console import Console
from cloudddp.cli.views.jobs import iso
from cloudddp.config.command_line import GlobalOptions
from cloudddp.errors import CloudDDPError, Command
from cloudddp.job import status
from cloudddp.job.failure_text import exited_text
from cloudddp.job.py_spy import gather_stacks
from cloudddp.job.status import JobRecord
from cloudddp.operations.node_connections import connected
from cloudddp.text import one_line

LONGEST_LINE = 300  # characters


def stacks(
    console: Console, options: GlobalOptions, *, anyone: bool, job_id: str | None, as_json: bool
) -> None:
    session = sessions.start(console, options, anyone=anyone)
    with connected(session, partly=True) as (cluster, runner):
        record = status.find(status.list_jobs(runner), job_id)
        if record.status.ended:
            raise CloudDDPError(
                f"job {record.id} has ended ({record.status}): none of its ranks runs",
                hint=(
                    Command("logs", record.id),
                    " shows its last lines, ",
                    Command("pull"),
                    " copies its logs and verdict",
                ),
            )
        found = gather_stacks(runner, cluster, record.id, console.log)
        record = status.find(status.list_jobs(runner), record.id)  # a rank may have exited meanwhile
    if not any(found.values()):
        raise CloudDDPError(
            f"no rank of job {record.id} runs yet", hint=(Command("logs", record.id), " shows what it does")
        )
    if as_json:
        console.print_json(_json(record, found))
        return
    console.print(_sentence(record, found))
    for node, ranks in sorted(found.items()):
        for rank in ranks:
            console.print(f"\nrank {rank.position.rank} on node {node}:")
            for line in rank.text.splitlines():
                console.print(f"  {one_line(line, LONGEST_LINE)}")


def _sentence(record: JobRecord, found: Mapping[int, tuple[RankStack, ...]]) -> str:
    running = summary(rank.position for ranks in found.values() for rank in ranks)
    return one_line("; ".join(part for part in (exited_text(record.exited), running) if part), 2000)


def _json(record: JobRecord, found: Mapping[int, tuple[RankStack, ...]]) -> dict[str, object]:
    ranks = [
        {
            "rank": one.position.rank,
            "node": node,
            "waits_in": one.position.waits or None,
            "function": one.position.function or None,
            "file": one.position.file or None,
            "line": one.position.line or None,
            "inside": one.position.inside or None,
            "error": one.position.error or None,
            "stack": one.text.splitlines(),
        }
        for node, stacks in found.items()
        for one in stacks
    ]
    return {
        "job": record.id,
        "summary": _sentence(record, found),
        "exited": [
            {"rank": one.rank, "node": one.node, "exit_code": 0, "ended": iso(one.ended)}
            for one in record.exited
        ],
        "ranks": sorted(ranks, key=lambda one: str(one["rank"]).zfill(9)),
    }
