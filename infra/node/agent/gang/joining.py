"""The beginning of a job on a node: whether its ranks can start, and why not. Pure."""

from __future__ import annotations

from dataclasses import replace

from agent.gang import preflight
from agent.gang.state import GangState
from cloudddp.agent.protocol.codec import MAX_TEXT
from cloudddp.agent.protocol.gang import MAX_PROBLEMS, Unreachable
from cloudddp.agent.protocol.jobs import MAX_LINE, Cause, Failure

PATIENCE = 5.0  # seconds more for the other nodes, for what the first one has decided to arrive


def is_late(state: GangState, now: float) -> bool:
    """Whether this node has waited long enough for the others."""
    if not state.is_connected:
        return now > state.policy.join_by
    # Those that are not connected say so by now; others may have a cold disk.
    is_first = state.node == min(state.nodes)
    return now > state.policy.facts_by + (0.0 if is_first else PATIENCE)


def problems(state: GangState) -> tuple[str, ...]:
    """Return why the ranks should not start although all nodes are connected."""
    if not state.policy.preflight:
        return ()
    found = preflight.problems(state.node, state.facts, state.skews)
    return tuple(one[:MAX_LINE] for one in found[:MAX_PROBLEMS])


def why_not_started(state: GangState) -> tuple[Unreachable, Failure]:
    """Return why no rank is started on this node: for the reply to `start`, and for the verdict."""
    node, missing, found = state.node, state.missing, state.problems
    losses = state.losses
    apart = [*missing.to, *missing.by]
    # A node that has ended is the cause, unless it has given up because of a connection that only this node
    # misses.
    peer = next((one for one in apart if one in state.lost or not losses), None)
    if not found and peer is None and not losses:
        unready = ", ".join(map(str, _unready(state)))
        found = (f"node {unready} was not ready in time (does nvidia-smi answer there?)",)
    if found:
        first = Failure(node, Cause.PREFLIGHT, detail="; ".join(found)[:MAX_TEXT])
    elif peer is not None:
        first = Failure(node, Cause.UNREACHABLE, detail=missing.to.get(peer, ""), peer=peer)
    else:
        first = losses[0].observed.failure
    return replace(missing, problems=found), first


def _unready(state: GangState) -> list[int]:
    """The nodes that are not yet connected to all others, or have not said what they are like. It may be this
    one."""
    own = frozenset() if state.is_announced else frozenset({state.node})
    return sorted(own | (state.others - state.ready))
