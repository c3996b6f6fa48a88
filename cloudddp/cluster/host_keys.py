"""A host key for each node: generated on the node over the first connection, before any rank runs, and
recorded here.

The nodes of a cluster boot with one shared host key from their user data, so that the first connection can be
verified. But every process on a node can read the user data from the instance metadata, so with that key any
rank could impersonate any node. So each node generates a key of its own and returns the public half over the
connection that the shared key has verified. It is recorded as pending before the node installs it, and as
current, the only key accepted for that instance, once the node has presented it. When every node has one, the
shared key is deleted: while a command replaces a lost node, which boots with a new one, only by that command.

If this is interrupted, the record says which keys a node may present, and the next command continues there.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import msgspec

from cloudddp import timings
from cloudddp.agent import client
from cloudddp.agent.client import Runner
from cloudddp.errors import CloudDDPError, ConnectError, NodeError, ProgressCallback
from cloudddp.local_state import ClusterFolder
from cloudddp.ssh.fleet import Outcome
from cloudddp.ssh.target import public_key

_RELOAD_SECONDS = 30.0  # sshd confirms a reload before it has done it, and may refuse connections meanwhile
_RETRY_SECONDS = 0.02


@dataclass(frozen=True)
class NodeKeys:
    """The keys of one instance, `ssh-ed25519 AAAA...` or ''. `pending` was generated but not yet
    presented."""

    current: str = ""
    pending: str = ""

    def __post_init__(self) -> None:
        if bool(self.current) == bool(self.pending):
            raise ValueError("a node has one key, current or pending")
        if public_key(self.current or self.pending) != (self.current or self.pending):
            raise ValueError("not in the form that cloudddp writes")


@dataclass(frozen=True)
class KnownKeys:
    """The host keys of a cluster that are recorded on this computer.

    `shared` is the one in the user data, '' once every node has its own. `created` are the instances that
    RunInstances returned to `up`, empty if its answer did not arrive.
    """

    shared: str
    created: frozenset[str]
    nodes: Mapping[str, NodeKeys]

    def accepted(self, instance: str) -> tuple[str, ...]:
        """Return the keys that an instance may present; none for an instance that `up` did not create."""
        node = self.nodes.get(instance)
        if node and node.current:
            return (node.current,)
        pending = (node.pending,) if node else ()
        shared = (self.shared,) if self.shared and (not self.created or instance in self.created) else ()
        return (*pending, *shared)

    def needs_own_key(self, instance: str) -> bool:
        """Return whether an instance of this cluster does not have a key of its own yet."""
        node = self.nodes.get(instance)
        return not (node and node.current) and bool(self.accepted(instance))


def read(folder: ClusterFolder) -> KnownKeys:
    """Return the recorded keys of a cluster. Raises CloudDDPError if the record is unreadable."""
    path = folder.host_key  # read first: it is deleted only after the other file has been written
    try:
        text = folder.read(path)
        shared = "" if text is None else public_key(text)
        path = folder.host_keys
        text = folder.read(path)
        nodes = {} if text is None else msgspec.json.decode(text, type=dict[str, NodeKeys])
    except (ValueError, RecursionError) as error:  # msgspec's own errors are ValueErrors
        raise CloudDDPError(
            f"{path}: cannot read the host keys of this cluster's nodes: {error}",
            hint="without them no node can be verified; `cloudddp down` stops the bill without SSH",
        ) from None
    return KnownKeys(shared, folder.created_instances(), nodes)


def incomplete(folder: ClusterFolder, instances: Mapping[int, str]) -> bool:
    """Return whether some nodes of a cluster do not have keys of their own yet."""
    known = read(folder)
    return any(known.needs_own_key(instance) for instance in instances.values())


def exclusive(
    folder: ClusterFolder, instances: Mapping[int, str], progress: ProgressCallback
) -> contextlib.AbstractContextManager[None]:
    """Hold a lock on this computer while nodes still need keys; otherwise do nothing."""
    waiting = "waiting for another cloudddp command to replace the nodes' host keys"
    needed = incomplete(folder, instances)
    return folder.exclusive(lambda: progress(waiting)) if needed else contextlib.nullcontext()


@timings.span("host keys")
def replace_shared_key(
    runner: Runner,
    folder: ClusterFolder,
    instances: Mapping[int, str],
    *,
    whole: bool,
    partly: bool,
    progress: ProgressCallback,
) -> dict[int, Exception]:
    """Give every node that has none a host key of its own, over open connections, and reconnect to it.

    `instances` are the ids of the cluster's nodes by node rank, whether connected or not; `whole`: the
    cluster has no other nodes. Takes two commands and one connection per node, none if nothing is to be done.
    Raises the first error of a node; with `partly`, returns the errors, and the other nodes have their keys.
    """
    known = read(folder)
    shared = known.shared
    todo = {node: instance for node, instance in instances.items() if known.needs_own_key(instance)}
    failed: dict[int, Exception] = {}

    def each(step: Callable[[int], str]) -> dict[int, str]:
        """Run a step on every node that has not failed; return the keys by node."""
        nodes = [node for node in runner.nodes if node in todo and node not in failed]
        outcome = runner.each(step, nodes=nodes, fatal=lambda _: not partly)
        failed.update(outcome.errors)
        return outcome.values

    def record(found: Mapping[int, str], make: Callable[[str], NodeKeys]) -> None:
        """Record the keys; then raise the first error, unless errors are to be returned."""
        nonlocal known
        new = {todo[node]: make(key) for node, key in found.items()}
        known = replace(known, nodes={**known.nodes, **new})
        text = msgspec.json.format(msgspec.json.encode(known.nodes).decode(), indent=1)
        folder.write(folder.host_keys, f"{text}\n")
        if failed and not partly:
            Outcome(errors=failed).all()

    if todo:
        progress("generating a new host key on every node")
        generated = each(lambda node: _generate(runner, node, known, todo[node]))
        failed.update(_duplicates(generated, known))
        unique = {node: key for node, key in generated.items() if node not in failed}
        record(unique, lambda key: NodeKeys(pending=key))
        record(each(lambda node: _install(runner, node, unique[node], shared)), NodeKeys)
    if shared and whole and not any(known.needs_own_key(one) for one in instances.values()):
        # A node that another command launches meanwhile, which `instances` does not name, boots with a new
        # shared key.
        with folder.resuming() as free:
            if free and read(folder).shared == shared:
                folder.host_key.unlink(missing_ok=True)
    return failed


def _duplicates(found: Mapping[int, str], known: KnownKeys) -> dict[int, Exception]:
    """Return an error for each node whose new key is also that of another node, or the shared one."""
    others = [node.current for node in known.nodes.values() if node.current]
    taken = [known.shared, *others, *found.values()]
    return {
        node: NodeError(
            f"node {node}: its new host key is not unique",
            hint="does the image install a fixed key into /etc/ssh at each boot? such an image cannot be "
            "used",
        )
        for node, key in found.items()
        if taken.count(key) > 1
    }


def _generate(runner: Runner, node: int, known: KnownKeys, instance: str) -> str:
    """Generate a key on a node, unless it already has one, and return the public half."""
    recorded = known.nodes.get(instance)
    if recorded and runner.host_key(node) == recorded.pending:
        # Already in use: the command that installed it was killed before it recorded this.
        return recorded.pending
    output = _run(runner, node, "make-host-key", known.shared)
    try:
        return public_key(output.decode("ascii"))
    except ValueError as error:
        raise NodeError(f"node {node}: cannot read its new host key: {error}") from None


def _install(runner: Runner, node: int, key: str, shared: str) -> str:
    """Install a node's key, and return it once the node has presented it on a new connection."""
    if runner.host_key(node) == key:
        return key
    _run(runner, node, "install-host-key", key)
    runner.expect(node, key)
    deadline = time.monotonic() + _RELOAD_SECONDS
    while True:
        try:
            runner.reconnect(node)
            return key
        except ConnectError as error:
            if (error.shown != shared and not error.patience) or time.monotonic() > deadline:
                raise
        time.sleep(_RETRY_SECONDS)


def _run(runner: Runner, node: int, step: str, key: str) -> bytes:
    hint = "the login user needs `sudo` without a password, as on AWS's images; is cluster.user right?"
    problem = "cannot replace its host key"
    return client.run_script(runner, node, "host-key.sh", step, key, root=True, problem=problem, hint=hint)
