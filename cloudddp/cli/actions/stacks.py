"""`stacks`."""

from __future__ import annotations

from collections.abc import Mapping

from cloudddp.agent.protocol.stacks import RankStack, summary
from cloudddp.cli.console import Console
from cloudddp.cli.session import start_session
from cloudddp.cli.views.jobs import iso
from cloudddp.errors import CloudDDPError, q
from cloudddp.job import status
from cloudddp.job.failure_text import exited_text
from cloudddp.job.py_spy import analyzed_dumps, gather_stacks
from cloudddp.job.status import JobRecord
from cloudddp.operations.node_connections import reachable
from cloudddp.text import one_line

LONGEST_LINE = 300  # characters
_POSITION = ("function", "file", "line", "inside", "error")  # keys, and fields of a rank's position


def stacks(console: Console, *, job_id: str | None, as_json: bool) -> None:
    session = start_session(console)
    with reachable(session) as (cluster, runner):
        record = status.find_job(runner, job_id)
        if record.setup:
            raise _nothing(record)
        found = gather_stacks(runner, cluster, record.id, console.log)
        dumps = analyzed_dumps(runner, record.id, found, session.settings.job.python)
        record = status.find_job(runner, record.id)  # a rank may have exited meanwhile
    ranks = {node: reply.ranks for node, reply in found.items()}
    if not any(ranks.values()) and not dumps:
        raise _nothing(record)
    nccl = next((one_line(reply.nccl) for reply in found.values() if reply.nccl), "")
    seen = [one for one in (nccl, dumps) if one]
    if as_json:
        console.print_json({**_json(record, ranks), "collectives": seen})
        return
    console.print("\n".join(filter(None, (_sentence(record, ranks), *seen))))
    for node, rank in ((node, rank) for node, listed in sorted(ranks.items()) for rank in listed):
        lines = (f"\n  {one_line(line, LONGEST_LINE)}" for line in rank.text.splitlines())
        console.print(f"\nrank {rank.position.rank} on node {node}:{''.join(lines)}")


def _nothing(record: JobRecord) -> CloudDDPError:
    return CloudDDPError(
        f"job {record.id} ({record.status}): no rank runs, and none has left a dump of PyTorch's flight "
        "recorder",
        hint=f"`cloudddp logs {q(record.id)}` shows its last lines",
    )


def _sentence(record: JobRecord, found: Mapping[int, tuple[RankStack, ...]]) -> str:
    running = summary(rank.position for ranks in found.values() for rank in ranks)
    return one_line("; ".join(filter(None, (exited_text(record.exited), running))), 2000)


def _json(record: JobRecord, found: Mapping[int, tuple[RankStack, ...]]) -> dict[str, object]:
    ranks = [
        {
            "rank": one.position.rank,
            "node": node,
            "waits_in": one.position.waits or None,
            **{key: getattr(one.position, key) or None for key in _POSITION},
            "stack": one.text.splitlines(),
        }
        for node, stacks in found.items()
        for one in stacks
    ]
    exited = [
        {"rank": one.rank, "node": one.node, "exit_code": 0, "ended": iso(one.ended)} for one in record.exited
    ]
    ranks.sort(key=lambda one: str(one["rank"]).zfill(9))
    return {"job": record.id, "summary": _sentence(record, found), "exited": exited, "ranks": ranks}
