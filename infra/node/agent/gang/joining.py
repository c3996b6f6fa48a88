"""The beginning of a job on a node: whether its ranks can start, and why not. Pure."""

from __future__ import annotations

from dataclasses import replace

from agent.gang.preflight import KINDS
from agent.gang.state import GangState
from cloudddp.agent.protocol.codec import MAX_TEXT
from cloudddp.agent.protocol.gang import MAX_PROBLEMS, Unreachable
from cloudddp.agent.protocol.jobs import MAX_LINE, Cause, Failure

CLOCK_SKEW = 2.0  # seconds between two nodes: more breaks certificates and the order of logs
LABELS = {
    "gpus": "the number or kind of GPUs",
    "driver": "the NVIDIA driver",
    "python": "Python",
    "nccl": "NCCL",
    "cuda": "CUDA",
    "image": "the image of job.container",
}
PATIENCE = 5.0  # seconds more for the other nodes, for what the first one has decided to arrive


def is_late(state: GangState, now: float) -> bool:
    """Whether this node has waited long enough for the others."""
    if not state.is_connected:
        return now > state.policy.join_by
    # Those that are not connected say so by now; others may have a cold disk.
    is_first = state.node == min(state.nodes)
    return now > state.policy.facts_by + (0.0 if is_first else PATIENCE)


def problems(state: GangState) -> tuple[str, ...]:
    """Return why the ranks should not start although all nodes are connected: defects of nodes, and what is
    not the same on all of them."""
    if not state.policy.preflight:
        return ()
    known = sorted(state.facts.items())
    found = [f"node {node}: {defect}" for node, facts in known for defect in facts.defects]
    in_container = any(facts.image for _, facts in known)  # which determines the versions
    for name in ("gpus", "driver", *(("image",) if in_container else KINDS)):
        values: dict[str, list[str]] = {}
        for node, facts in known:
            values.setdefault(getattr(facts, name), []).append(str(node))
        if len(values) > 1:
            shown = (f"{value or 'none'} on node {', '.join(nodes)}" for value, nodes in values.items())
            found.append(f"{LABELS.get(name, name)} differs: {'; '.join(shown)}")
    for node, skew in sorted(state.skews.items()):
        if abs(skew) > CLOCK_SKEW:
            found.append(f"the clock of node {node} is {skew:+.0f} s from that of node {state.node}")
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
        own = frozenset() if state.is_announced else frozenset({node})
        unready = ", ".join(map(str, sorted(own | (state.others - state.ready))))
        found = (f"node {unready} was not ready in time (does nvidia-smi answer there?)",)
    if found:
        first = Failure(node, Cause.PREFLIGHT, detail="; ".join(found)[:MAX_TEXT])
    elif peer is not None:
        first = Failure(node, Cause.UNREACHABLE, detail=missing.to.get(peer, ""), peer=peer)
    else:
        first = losses[0].observed.failure
    return replace(missing, problems=found), first
