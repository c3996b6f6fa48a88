"""Ranks that train on each node alone are named, since such a job succeeds and costs as much as all its
nodes."""

from __future__ import annotations

from dataclasses import replace

from support.gangs import Make

from cloudddp.agent.protocol.phases import JobPhase

NOTE = "node 1: no rank has connected to another node"
ADDRESSES = ("127.0.0.3", "127.0.0.2")
# A group of its own, as that of mp.spawn with MASTER_ADDR=localhost.
LOCAL = (
    "import socket, time\nserver = socket.create_server(('127.0.0.1', 0))\nclient = "
    "socket.create_connection(server.getsockname())\ntime.sleep(8)\n"
)


def test_node_that_trains_alone_is_named_once(gangs: Make) -> None:
    """In a gang of two nodes with different addresses."""
    job = gangs(2)
    peers = tuple(replace(p, address=where) for p, where in zip(job.gang.peers, ADDRESSES, strict=True))
    job.gang = replace(job.gang, peers=peers)
    job.start(LOCAL, LOCAL, alone_seconds=6.0)
    assert job.verdict().phase is JobPhase.SUCCEEDED
    assert [job.log(rank, rank).decode().count(NOTE) for rank in range(2)] == [0, 1]
