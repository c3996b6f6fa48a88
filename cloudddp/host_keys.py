"""Each node's own host key: made by the node over the first connection, before any rank runs, recorded on this laptop.

The nodes of a cluster boot with one host key that their user data holds, so that the first connection can be checked.
But every process on a node can read the user data from the instance metadata, so any rank could pose as any node. Here
each node makes a key of its own and returns the public half over the connection that the first key has proved. That
is recorded as pending before the node installs it, and as current when the node has shown it. From then on
it is the only key accepted for that instance, and when every node is done the first key is forgotten.

Whatever interrupts that, the record says which keys a node may show, and the next command continues from there.
"""

from __future__ import annotations

import contextlib
import shlex
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

from cloudddp import payload
from cloudddp.errors import CloudDDPError, ConnectError, NodeError
from cloudddp.nodes import Runner, last_words
from cloudddp.ssh import keys
from cloudddp.ssh.fleet import Outcome
from cloudddp.state import ClusterFolder

MAX_ANSWER = 1 << 20  # bytes that a step may write, with what a .bashrc adds
RELOAD_SECONDS = 30.0  # sshd answers a reload before it has done it, and may refuse connections meanwhile

Say = Callable[[str], None]


@dataclass(frozen=True)
class NodeKeys:
    """The keys of one instance, `ssh-ed25519 AAAA...` or ''. `pending` was made, but not yet seen in use."""

    current: str = ""
    pending: str = ""

    def __post_init__(self) -> None:
        if bool(self.current) == bool(self.pending):
            raise ValueError("a node has one key, current or pending")
        if keys.public(self.current or self.pending) != (self.current or self.pending):
            raise ValueError("not as this program writes it")


@dataclass(frozen=True)
class Known:
    """What this laptop knows of a cluster's host keys.

    `first` is the one that the user data holds, '' once every node has its own; `made` are the instances that `up`
    made, as far as AWS's answers reached it.
    """

    first: str
    made: frozenset[str]
    nodes: Mapping[str, NodeKeys]

    def accepted(self, instance: str) -> tuple[str, ...]:
        """Return the keys by which an instance may prove itself: none for one that `up` did not make."""
        node = self.nodes.get(instance)
        if node and node.current:
            return (node.current,)
        pending = (node.pending,) if node else ()
        first = (self.first,) if self.first and (not self.made or instance in self.made) else ()
        return (*pending, *first)

    def unfinished(self, instance: str) -> bool:
        """Return whether an instance of this cluster has yet to be given a key of its own."""
        node = self.nodes.get(instance)
        return not (node and node.current) and bool(self.accepted(instance))


def read(folder: ClusterFolder) -> Known:
    """Return what is recorded of a cluster. Raises CloudDDPError where that cannot be read: nothing is guessed."""
    import msgspec

    path = folder.host_key  # read before the other: whoever removes it has written that
    try:
        text = folder.read(path)
        first = "" if text is None else keys.public(text)
        path = folder.host_keys
        text = folder.read(path)
        nodes = {} if text is None else msgspec.json.decode(text, type=dict[str, NodeKeys])
    except (ValueError, RecursionError) as error:  # msgspec's own errors are ValueErrors
        raise CloudDDPError(
            f"{path}: cannot read the host keys of this cluster's nodes: {error}",
            hint="without them no node can be trusted; `cloudddp down` ends the bill without SSH",
        ) from None
    return Known(first, folder.instances_made(), nodes)


def _write(folder: ClusterFolder, known: Known) -> None:
    import msgspec

    text = msgspec.json.format(msgspec.json.encode(known.nodes).decode(), indent=1)
    folder.write(folder.host_keys, f"{text}\n")


def unfinished(folder: ClusterFolder, instances: Mapping[int, str]) -> bool:
    """Return whether some of a cluster's nodes have yet to be given keys of their own."""
    known = read(folder)
    return any(known.unfinished(instance) for instance in instances.values())


@contextlib.contextmanager
def one_at_a_time(folder: ClusterFolder, instances: Mapping[int, str], say: Say) -> Iterator[None]:
    """Keep other commands of this laptop out while nodes have yet to be given keys; else do nothing."""
    if not unfinished(folder, instances):
        yield
        return
    with folder.alone(lambda: say("waiting for another cloudddp command to replace the nodes' host keys")):
        yield


def finish(
    runner: Runner,
    folder: ClusterFolder,
    instances: Mapping[int, str],
    *,
    whole: bool,
    partly: bool,
    say: Say,
) -> dict[int, Exception]:
    """Give every node that has none a host key of its own, over open connections, and reconnect to it.

    `instances` are the ids of the cluster's nodes, by node rank, whether connected or not; `whole`: it has no other
    nodes. Two commands and a connection a node, none where nothing is to be done. Raises what goes wrong on a node;
    with `partly`, returns it, and the other nodes are done.
    """
    known = read(folder)
    todo = {node: instance for node, instance in instances.items() if known.unfinished(instance)}
    failed: dict[int, Exception] = {}
    if todo:
        say("replacing the host key that all nodes share with one for each node")

        def each(work: Callable[[int], str]) -> dict[int, str]:
            """Return the keys by node, and note the nodes that failed."""
            outcome: Outcome[str] = runner.each(
                lambda node: work(node) if node in todo and node not in failed else "",
                fatal=lambda _: not partly,
            )
            failed.update(outcome.errors)
            return {node: key for node, key in outcome.values.items() if key}

        def record(found: Mapping[int, str], make: Callable[[str], NodeKeys]) -> Known:
            noted = replace(known, nodes={**known.nodes, **{todo[n]: make(key) for n, key in found.items()}})
            _write(folder, noted)
            if failed and not partly:
                Outcome(errors=failed).all()
            return noted

        made = each(lambda node: _make(runner, node, known, todo[node]))
        failed.update(_repeated(made, known))
        made = {node: key for node, key in made.items() if node not in failed}
        known = record(made, lambda key: NodeKeys(pending=key))
        installed = each(lambda node: _install(runner, node, made[node], known.first))
        known = record(installed, lambda key: NodeKeys(current=key))
    if known.first and whole and not any(known.unfinished(one) for one in instances.values()):
        folder.host_key.unlink(missing_ok=True)  # from here on nothing that the user data holds is accepted
    return failed


def _repeated(made: Mapping[int, str], known: Known) -> dict[int, Exception]:
    """Return an error for each node whose new key is also that of another node, or the first one."""
    others = [node.current for node in known.nodes.values() if node.current]
    taken = [known.first, *others, *made.values()]
    return {
        node: NodeError(
            f"node {node}: its new host key is not unique",
            hint="does the image put a fixed key into /etc/ssh at each boot? such an image cannot be used",
        )
        for node, key in made.items()
        if taken.count(key) > 1
    }


def _make(runner: Runner, node: int, known: Known, instance: str) -> str:
    """Have a node make a key, unless it has one already, and return the public half."""
    recorded = known.nodes.get(instance)
    if recorded and runner.host_key(node) == recorded.pending:
        # In use already: the command that installed it was killed before it could record that.
        return recorded.pending
    output = _run(runner, node, "make-host-key", known.first)
    try:
        last_line = output.decode("ascii").rstrip().rpartition("\n")[2]  # a .bashrc may have written before
        return keys.public(last_line)
    except ValueError as error:
        raise NodeError(f"node {node}: cannot read its new host key: {error}") from None


def _install(runner: Runner, node: int, key: str, first: str) -> str:
    """Have a node install its key, and return it when the node has shown it on a new connection."""
    if runner.host_key(node) == key:
        return key
    _run(runner, node, "install-host-key", key)
    runner.expect(node, key)
    deadline = time.monotonic() + RELOAD_SECONDS
    while True:
        try:
            runner.reconnect(node)
            return key
        except ConnectError as error:
            if (error.shown != first and not error.patience) or time.monotonic() > deadline:
                raise
        time.sleep(0.02)


def _run(runner: Runner, node: int, step: str, key: str) -> bytes:
    command = f"sudo -n sh -s -- {shlex.join([step, key])}"
    script = payload.text("infra/node/host-key.sh").encode()
    result = runner.run(node, command, stdin=script, limit=MAX_ANSWER)
    if result.exit_code:
        raise NodeError(
            f"node {node}: cannot replace its host key: {last_words(result)}",
            hint="the login user needs `sudo` without a password, as on AWS's images; is cluster.user right?",
        )
    return result.stdout
