"""Connections to the nodes of the caller's cluster, and what is reported of the nodes that do not answer."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator
from datetime import UTC, datetime

from cloudddp.agent.client import Runner
from cloudddp.cluster import connect, lookup
from cloudddp.cluster.model import Cluster
from cloudddp.errors import CloudDDPError, ConnectError, ConnectionLost, Message, NodeError, inert
from cloudddp.operations.account import Account
from cloudddp.operations.reporter import Reporter
from cloudddp.operations.session import Session
from cloudddp.text import node_list

_BOOT_SECONDS = 600.0  # in which a replacement may boot


@contextlib.contextmanager
def connected(
    session: Session[Reporter], *, whole: bool = False, only: int | None = None
) -> Iterator[tuple[Cluster, Runner]]:
    """Yield (cluster, connections to its nodes) and close them. Raises if a node does not answer. `whole`:
    refuse a cluster that has lost a node. `only`: connect to this node, so that the others may be idle and
    end."""
    found = _cluster(session, whole=whole)
    if only is not None:
        found = found.only({found.require_node(only).id})
    spec, progress = session.settings.cluster, session.console.log
    with _opened(session, found, lambda: (connect.connect(found, spec, progress=progress), {})) as (
        runner,
        _,
    ):
        yield found, runner


@contextlib.contextmanager
def reachable(
    session: Session[Reporter], *, required: Collection[int] | None = None, listing: bool = False
) -> Iterator[tuple[Cluster, Runner]]:
    """Yield (cluster, connections to those nodes that answer) and close them; the silence of another one is
    a warning. `required`: these have to answer; without it, NodeError names the silent ones at the end.
    `listing`: a replacement that boots has nothing to list, and is not silent."""
    found = _cluster(session)
    spec, progress = session.settings.cluster, session.console.log
    with _opened(session, found, lambda: connect.connect_reachable(found, spec, progress=progress)) as (
        runner,
        silent,
    ):
        booting = {node for node, error in silent.items() if listing and _boots(found, node, error)}
        for node in booting:
            session.console.log(f"node {node} is booting: it replaces a lost node")
        missed = {node: error for node, error in silent.items() if node not in booting}
        for node, error in missed.items():
            if required is not None and node in required:
                raise error
            session.console.warn(str(error))
        yield found, runner
    if missed and required is None:
        error, them = missed[min(missed)], "them" if len(missed) > 1 else "it"
        raise NodeError(
            f"{node_list(missed)} could not be queried: the output does not include {them}",
            hint=error.hint if isinstance(error, CloudDDPError) else "",
        )


def _cluster(session: Session[Reporter], *, whole: bool = False) -> Cluster:
    """Return the caller's cluster. Lost nodes are a warning, or an error if it has to be `whole`."""
    found = session.account.cluster()
    if count := found.missing:
        nodes = f"{count} of {count + len(found.nodes)} nodes of cluster {found.name!r}"
        gone = f"{nodes} {'is' if count == 1 else 'are'} gone"
        if whole:
            hint = (
                "`cloudddp resume` replaces them and starts the last job again; or `cloudddp pull` what you "
                "need, then `cloudddp down` and `cloudddp up`"
            )
            raise CloudDDPError(gone, hint=Message(hint))
        session.console.warn(gone)
    return found


@contextlib.contextmanager
def _opened(
    session: Session[Reporter], found: Cluster, dial: Callable[[], tuple[Runner, dict[int, Exception]]]
) -> Iterator[tuple[Runner, dict[int, Exception]]]:
    """Yield what `dial` returns, (connections, why other nodes are silent), with what AWS says of those."""
    with cause_named(session.account, found):
        try:
            runner, silent = dial()
        except ConnectError:  # which names one node of several
            _warn_of_problems(session.account, found, found.nodes)
            raise
        with contextlib.closing(runner):
            _warn_of_problems(session.account, found, silent)
            yield runner, silent


@contextlib.contextmanager
def cause_named(account: Account, cluster: Cluster) -> Iterator[None]:
    """Raise NodeError with what AWS reports where a connection broke because instances have ended: another
    command may have removed the cluster."""
    try:
        yield
    except NodeError as error:
        ended: dict[int, lookup.EndedNode] = {}
        if isinstance(error, ConnectionLost | ConnectError):
            with contextlib.suppress(CloudDDPError):
                ended = lookup.ended_nodes(account.aws(), cluster, cluster.nodes)
        if not ended:
            raise
        node, first = min(ended.items())
        what = error.reason if isinstance(error, ConnectionLost) else error.message
        raise NodeError(
            f"{what}; node {node}: AWS reports {inert(first.report)}",
            hint=Message("`cloudddp status` shows what is left of the cluster"),
        ) from None


def _warn_of_problems(account: Account, found: Cluster, nodes: Collection[int]) -> None:
    """Warn of failed status checks and scheduled events of these nodes."""
    for node, text in (lookup.status_problems(account.aws(), found, nodes) if nodes else {}).items():
        account.console.warn(f"node {node} ({found.nodes[node].id}): {text}")


def _boots(cluster: Cluster, node: int, error: Exception) -> bool:
    """Return whether a node that does not answer replaces another one and was launched a short time ago."""
    instance = cluster.nodes[node]
    first = min(cluster.nodes.values(), key=lambda one: one.launched or datetime.max.replace(tzinfo=UTC))
    if instance.launched is None or instance.reservation == first.reservation:
        return False
    age = (datetime.now(UTC) - instance.launched).total_seconds()
    return isinstance(error, ConnectError) and bool(error.patience) and age < _BOOT_SECONDS
