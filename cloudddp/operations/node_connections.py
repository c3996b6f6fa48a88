"""Connections to the nodes of the caller's cluster, and what is reported of the nodes that do not answer."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator
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
    session: Session[Reporter],
    *,
    whole: bool = False,
    partly: bool = False,
    listing: bool = False,
    needed: Collection[int] | None = None,
    only: int | None = None,
) -> Iterator[tuple[Cluster, Runner]]:
    """Yield (cluster, connections to its nodes) and close them. `whole`: refuse a cluster that has lost a
    node. `partly`: continue without the nodes that do not answer, and raise NodeError, naming them, at the
    end. `listing`: a replacement that boots has nothing to list, and is no error. `needed`, with `partly`:
    only these have to answer, the silence of another one is a warning. `only`: connect to this node, so that
    the others may be idle and end."""
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
    if only is not None:
        found = found.only({found.require_node(only).id})
    silent: dict[int, Exception] = {}
    with cause_named(session.account, found):
        spec, progress = session.settings.cluster, session.console.log
        try:
            if partly:
                runner, silent = connect.connect_reachable(found, spec, progress=progress)
            else:
                runner = connect.connect(found, spec, progress=progress)
        except ConnectError:  # which names one node of several
            _warn_of_problems(session.account, found, found.nodes)
            raise
        with contextlib.closing(runner):
            _warn_of_problems(session.account, found, silent)
            booting = [node for node, error in silent.items() if listing and _boots(found, node, error)]
            for node in booting:
                session.console.log(f"node {node} is booting: it replaces a lost node")
                del silent[node]
            for node, error in silent.items():
                if needed is not None and node in needed:
                    raise error
                session.console.warn(str(error))
            yield found, runner
    if silent and needed is None:
        error, them = silent[min(silent)], "them" if len(silent) > 1 else "it"
        raise NodeError(
            f"{node_list(silent)} could not be queried: the output does not include {them}",
            hint=error.hint if isinstance(error, CloudDDPError) else "",
        )


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
