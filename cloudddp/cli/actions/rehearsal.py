"""--dry-run: the verbs' own code against moto in this process, and nodes that print the commands they get.

Nothing is called: no AWS, no SSH, no file outside a temporary folder. Ids and addresses are made up. The
calls, their parameters, the commands on the nodes and the price are the real ones, because the code that
makes them is.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shlex
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from cloudddp.agent import program
from cloudddp.agent.protocol.codec import decode, encode
from cloudddp.agent.protocol.file_steps import ReceiveEvent, ReceiveReply, ReceiveRequest
from cloudddp.agent.protocol.machine import ProbeReply
from cloudddp.agent.protocol.manifest import FILE
from cloudddp.agent.protocol.start import Process, SetupReply, SetupRequest, StartReply, StartRequest
from cloudddp.agent.protocol.transfer import Frames, Wants, read_listing
from cloudddp.aws import instance_types
from cloudddp.aws.client import AWS
from cloudddp.aws.instance_types import TypeInfo
from cloudddp.cli.console import Console
from cloudddp.cli.views import lifecycle
from cloudddp.cluster import lookup
from cloudddp.cluster import up as creating
from cloudddp.cluster.connect import Meanwhile, ssh_sources
from cloudddp.cluster.model import Cluster
from cloudddp.cluster.plan import Plan
from cloudddp.config.spec import ClusterSpec, Config
from cloudddp.errors import CloudDDPError
from cloudddp.job import launch as starting
from cloudddp.job import ranks
from cloudddp.job.job_request import NewJob, Script
from cloudddp.ssh.fleet import Outcome
from cloudddp.ssh.running import CommandSpec, Result
from cloudddp.ssh.target import generate_key

T = TypeVar("T")
Print = Callable[[str], None]
_WRAPPER = ("python3", "agent.pyz", "rank")  # records each rank's log and exit code
JUMP_HOST = "10.0.0.10"  # stands for the private address of a jump host
CALLER = "203.0.113.7/32"  # stands for this computer's own address; from the range for documentation


@dataclass(eq=False)
class Nodes:
    """Replaces the SSH fleet: prints each command, if `print` is given, and answers as a healthy node.

    `hidden` are the variables set by the user, whose values may be secret.
    """

    cluster: Cluster
    gpus: int
    cpus: int
    efa: int = 0
    hidden: Collection[str] = ()
    print: Print | None = None  # what it replaces
    host_keys: dict[int, str] = field(default_factory=dict)

    @classmethod
    def of(cls, cluster: Cluster, info: TypeInfo, shown: Print | None, hidden: Collection[str] = ()) -> Nodes:
        return cls(cluster, info.gpus, info.vcpus, info.max_efa, hidden, shown)

    @property
    def nodes(self) -> tuple[int, ...]:
        return tuple(self.cluster.nodes)

    def connection(self, _node: int) -> None:
        """There is none: each step is shown as a command of its own."""
        return

    def run(self, node: int, spec: CommandSpec) -> Result:
        command, stdin = spec.command, spec.stdin
        step = program.step_of(command)
        if step == ReceiveRequest.STEP and spec.on_stdout is not None:
            pieces = iter(()) if isinstance(stdin, bytes) else iter(stdin)
            return self._receive(node, command, pieces, spec.on_stdout)
        data = stdin if isinstance(stdin, bytes) else b"".join(stdin)
        if self.print:
            for line in self._shown(node, step, command, data):
                self.print(line)
        if "make-host-key" in command:
            return Result(0, generate_key().public.encode(), b"")
        return Result(0, self._answer(step), b"")

    def _receive(
        self, node: int, command: str, stdin: Iterator[bytes], report: Callable[[bytes], None]
    ) -> Result:
        """Answer as a node does that has no files, and gets them at once."""
        frames = Frames(decode(next(stdin), ReceiveRequest).secret.encode())
        (offer,) = itertools.islice((frame for piece in stdin for frame in frames.feed(piece)), 1)
        files = [entry for _, entry in read_listing(offer).entries()]
        wanted = tuple(number for number, entry in enumerate(files) if entry.kind == FILE)
        size = sum(entry.size for entry in files)
        for event in (
            ReceiveEvent(Wants(wanted)),
            ReceiveEvent(complete=True, done=ReceiveReply()),
        ):
            report(encode(event) + b"\n")
        if self.print:
            for line in self._shown(node, "", command, b""):
                self.print(line)
            self.print(f"  < {len(files)} files of the project, {size} bytes, from here or from another node")
        return Result(0, b"", b"")

    def _shown(self, node: int, step: str, command: str, data: bytes) -> Iterator[str]:
        """Yield the lines that show a command and what it gets on stdin."""
        instance = self.cluster.nodes[node]
        yield f"\nnode {node} ({instance.public_ip or instance.private_ip}) $ {command}"
        message = data.partition(b"\n")[0]
        if step == StartRequest.STEP:
            start = decode(message, StartRequest)
            if start.container is not None:
                yield f"  in a container of {start.container.image}:"
            for process in start.processes:
                yield from _process(start.env, process, self.hidden)
        elif step == SetupRequest.STEP:
            yield from (f"  < {line}" for line in decode(message, SetupRequest).commands)
        elif data and step:
            yield f"  < {message.decode()}"
        elif data:
            yield f"  < {len(data)} bytes: infra/node/host-key.sh"

    def _answer(self, step: str) -> bytes:
        replies: dict[str, ProbeReply | SetupReply | StartReply] = {
            "probe": ProbeReply(
                interface="ens5",
                gpus=self.gpus,
                cpus=self.cpus,
                python="/opt/pytorch/bin/python",
                free_port=29500,
                agent_port=29501,
                time=time.time(),
                timer_state="active",
                timer_next="-",
                running=(),
                differs=True,
                torch_gpus=self.gpus,
                efa=self.efa,
            ),
            "setup": SetupReply(exit_code=0),
            "start": StartReply(),
        }
        return encode(replies[step]) if step in replies else b"{}"

    def each(
        self,
        work: Callable[[int], T],
        *,
        nodes: Iterable[int] | None = None,
        fatal: Callable[[Exception], bool] = lambda _: True,
        meanwhile: object = None,  # noqa: ARG002  the protocol's
    ) -> Outcome[T]:
        """Work on one node after the other, so that the order of the output is fixed."""
        outcome: Outcome[T] = Outcome()
        for node in self.cluster.nodes if nodes is None else nodes:
            try:
                outcome.values[node] = work(node)
            except CloudDDPError as error:
                outcome.errors[node] = error
                if fatal(error):
                    break
        return outcome

    @property
    def ids(self) -> dict[int, str]:
        return {node: instance.id for node, instance in self.cluster.nodes.items()}

    def host_key(self, node: int) -> str:
        """Return the key that the node would have shown; '' for the one of the user data."""
        return self.host_keys.get(node, "")

    def expect(self, node: int, host_key: str) -> None:
        self.host_keys[node] = host_key

    def leave_out(self, nodes: Iterable[int]) -> None:
        """Nothing to do: no node is lost."""

    def reconnect(self, node: int, wanted: Callable[[], bool] = lambda: True) -> None:
        """Nothing to do: no connection breaks."""

    def close(self) -> None:
        """Nothing to do: no connection is open."""


def _process(shared: Mapping[str, str], process: Process, hidden: Collection[str]) -> Iterator[str]:
    yield "  starts: " + shlex.join((*process.launcher, *_WRAPPER, *process.rank))
    for name, value in sorted({**shared, **process.env}.items()):
        yield f"    {name}={'****' if name in hidden else value}"


class Recorder:
    """Prints AWS calls as they are made, while it is switched on."""

    def __init__(self, print: Print, *, on: bool) -> None:  # noqa: A002  what it replaces
        self._print = print
        self._lock = threading.Lock()  # Elastic IPs are allocated in parallel
        self._tags: Any = None  # of the cluster, once they have been printed
        self.on = on

    def __call__(self, service: str, method: str, params: Mapping[str, Any], answer: Any) -> None:
        if not self.on:
            return
        with self._lock:
            self._show(service, method, params, answer)

    def _show(self, service: str, method: str, params: Mapping[str, Any], answer: Any) -> None:
        operation = "".join(word.capitalize() for word in method.split("_"))
        self._print(f"\naws {service} {operation}")
        for name, value in params.items():
            if name == "TagSpecifications" and params.get("DryRun"):  # it has another cluster id
                self._print("  TagSpecifications: as of the launch below")
            elif name == "TagSpecifications":
                self._show_tags(value)
            else:
                self._print(f"  {name}: {_shown(name, value)}")
        created = {key: answer[key] for key in ("GroupId", "KeyPairId", "AllocationId") if key in answer}
        if created:
            self._print(f"  -> {json.dumps(created)}")

    def _show_tags(self, specifications: Sequence[Mapping[str, Any]]) -> None:
        """Print which objects get tags, and the tags once: those of the cluster are the same in every
        call."""
        kinds: dict[str, list[str]] = {}
        for one in specifications:
            tags = {tag["Key"]: tag["Value"] for tag in one["Tags"]}
            if self._tags is None:
                self._tags = tags
                self._print("  the cluster's tags:")
                for key, value in tags.items():
                    self._print(f"    {key}: {json.dumps(value)}")
            more = {key: value for key, value in tags.items() if self._tags.get(key) != value}
            also = f" and {json.dumps(more)}" if more else ""
            kinds.setdefault(f"with the cluster's tags{also}", []).append(one["ResourceType"])
        for which, found in kinds.items():
            self._print(f"  TagSpecifications: {', '.join(found)} {which}")


def _shown(name: str, value: Any) -> str:
    if name == "UserData":
        return (
            f"<{len(value)} bytes of cloud-config: the first host key, and the timer that terminates the "
            "node at the deadline>"
        )
    if isinstance(value, bytes):
        return value.decode()
    return json.dumps(value, default=str)


def up(console: Console, settings: Config) -> None:
    """Print what `up` would do."""
    with _dry_run(console, settings, "up") as (aws, recorder):
        recorder.on = True
        plan = _bring_up(console, aws, settings, show=True)
        recorder.on = False
        console.print_text(f"\n{plan}\n\n# End of the dry run. Nothing was started; nothing costs anything.")


def launch(console: Console, settings: Config, script: Script, root: Path) -> None:
    """Print what `launch` would do on a new cluster of these settings."""
    with _dry_run(console, settings, "launch") as (aws, recorder):
        console.print_text(f"\n{_bring_up(console, aws, settings, show=False)}")
        recorder.on = True
        found = lookup.get(aws, settings.cluster.name)
        recorder.on = False
        info = instance_types.describe(
            aws, msgspec.structs.replace(settings.cluster, instance_type=found.type)
        )
        starting.launch(
            Nodes.of(found, info, console.print, settings.job.env),
            found,
            settings,
            NewJob(script),
            root=root,
            progress=lambda text: console.print(f"\n# {console.render(text)}"),
            sources={one.source: f"{one.source}:/" for one in settings.shared},
        )
        console.print("\n# End of the dry run. Nothing was started.")


@contextlib.contextmanager
def _dry_run(console: Console, settings: Config, verb: str) -> Iterator[tuple[AWS, Recorder]]:
    """Yield an AWS that is moto, and what prints the calls to it."""
    try:
        # moto takes 0.5 s to import, is only needed here and by the simulator, and may not be installed.
        from cloudddp.simulator import aws as simulated

        rehearsal = simulated.rehearse(settings.cluster.instance_profile or "")
        rehearsal.__enter__()
    except ImportError:
        raise CloudDDPError(
            "--dry-run needs moto", hint="pip install 'cloudddp[sim]' (in a clone: pip install '.[sim]')"
        ) from None
    try:
        with tempfile.TemporaryDirectory(prefix="cloudddp-dry-run-") as folder:
            os.environ["CLOUDDDP_HOME"] = folder  # `rehearse` restores the environment
            console.print(f"# Dry run of `{verb}`: nothing is called; ids, addresses and sizes are made up.")
            recorder = Recorder(console.print, on=False)
            if settings.cluster.reservation:
                _reserve(console, settings.cluster)
            yield AWS(region=settings.cluster.region, observe=recorder), recorder
    finally:
        rehearsal.__exit__(None, None, None)


def _reserve(console: Console, spec: ClusterSpec) -> None:
    """Give the made-up account the reservation of the settings."""
    # moto again: see _dry_run
    from cloudddp.simulator import aws as simulated

    zone = simulated.reserve(
        str(spec.reservation),
        instance_type=spec.types[0],
        count=spec.nodes,
        zone=spec.zones[0] if spec.zones else None,
    )
    console.print(
        f"# Assumed: {spec.reservation} is an on-demand reservation for {spec.nodes} x {spec.types[0]} "
        f"in {zone}."
    )


def _bring_up(console: Console, aws: AWS, settings: Config, *, show: bool) -> str:
    """Do what `up` does; return the plan that it shows before it asks. `show`: print what it does on the
    nodes."""
    info: list[TypeInfo] = []
    shown: list[str] = []
    left_out: list[str] = []

    def progress(text: str) -> None:
        line = console.render(text)
        if not shown and line.startswith("left out: "):
            left_out.append(f"  {line}")

    def agree(plans: Sequence[Plan], found: TypeInfo) -> None:
        for one in plans:
            ranks.nproc(settings.job, [one.context.info.gpus] * settings.cluster.nodes)
        info.append(found)
        shown.append("\n".join([lifecycle.plans(plans, found, settings.cluster), *left_out]))
        if show:
            console.print("\n# Here `up` shows the plan, which is at the end of this dry run, and asks.")

    def dial(created: Cluster, _: ClusterSpec, __: float, ___: Meanwhile) -> Nodes:
        return Nodes.of(created, info[0], console.print if show else None)

    creating.up(
        [aws],
        settings.cluster,
        progress=progress,
        confirm=agree,
        dial=dial,
        check_route=lambda _: None,
        ssh_sources=lambda aws, spec: ssh_sources(aws, spec, lambda: CALLER, lambda *_: JUMP_HOST),
    )
    return shown[0]
