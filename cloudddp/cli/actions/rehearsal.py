"""--dry-run: the verbs' own code against moto in this process, and nodes that print the commands they get.

Nothing is called: no AWS, no SSH, no file outside a temporary folder. Ids and addresses are made up; calls,
commands and the price are the real ones, because the code that makes them is.
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
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from cloudddp.agent import program
from cloudddp.agent.protocol.codec import decode, encode
from cloudddp.agent.protocol.file_steps import ReceiveEvent, ReceiveReply, ReceiveRequest
from cloudddp.agent.protocol.machine import ProbeReply
from cloudddp.agent.protocol.manifest import FILE
from cloudddp.agent.protocol.start import SetupReply, SetupRequest, StartReply, StartRequest
from cloudddp.agent.protocol.transfer import Frames, Wants, read_listing
from cloudddp.aws.client import AWS
from cloudddp.aws.instance_types import TypeInfo
from cloudddp.cli.console import Console
from cloudddp.cli.views import lifecycle
from cloudddp.cluster import lookup
from cloudddp.cluster import up as creating
from cloudddp.cluster.connect import Meanwhile, Reach, ssh_sources
from cloudddp.cluster.model import Cluster
from cloudddp.cluster.plan import Plan
from cloudddp.config.cluster_spec import ClusterSpec
from cloudddp.config.spec import Config
from cloudddp.errors import CloudDDPError, Excluded
from cloudddp.job import launch as starting
from cloudddp.job import project_files, ranks
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
class PrintingRunner:
    """Replaces the SSH fleet: shows each command, and answers as a healthy node. `hidden`: variables whose
    values may be secret."""

    cluster: Cluster
    gpus: int
    cpus: int
    efa: int = 0
    show: Print = lambda _: None
    hidden: Collection[str] = ()
    host_keys: dict[int, str] = field(default_factory=dict)

    @property
    def nodes(self) -> tuple[int, ...]:
        return tuple(self.cluster.nodes)

    @property
    def ids(self) -> dict[int, str]:
        return {node: instance.id for node, instance in self.cluster.nodes.items()}

    def connection(self, _node: int) -> None:
        """There is none: each step is shown as a command of its own."""
        return

    def run(self, node: int, spec: CommandSpec) -> Result:
        command, step = spec.command, program.step_of(spec.command)
        pieces = iter((spec.stdin,) if isinstance(spec.stdin, bytes) else spec.stdin)
        if step == ReceiveRequest.STEP and spec.on_stdout is not None:
            return self._receive(node, command, pieces, spec.on_stdout)
        data = b"".join(pieces)
        for line in self._shown(node, step, command, data):
            self.show(line)
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
        for event in (ReceiveEvent(Wants(wanted)), ReceiveEvent(complete=True, done=ReceiveReply())):
            report(encode(event) + b"\n")
        for line in self._shown(node, "", command, b""):
            self.show(line)
        self.show(f"  < {len(files)} files of the project, {size} bytes, from here or from another node")
        return Result(0, b"", b"")

    def _shown(self, node: int, step: str, command: str, data: bytes) -> Iterator[str]:
        """Yield the lines that show a command and what it gets on stdin."""
        instance = self.cluster.nodes[node]
        yield f"\nnode {node} ({instance.public_ip or instance.private_ip}) $ {command}"
        message = data.partition(b"\n")[0]
        if step == StartRequest.STEP:
            work = decode(message, StartRequest).work
            if work.container is not None:
                yield f"  in a container of {work.container.image}:"
            for process in work.processes:
                yield "  starts: " + shlex.join((*process.launcher, *_WRAPPER, *process.rank))
                for name, value in sorted({**work.env, **process.env}.items()):
                    yield f"    {name}={'****' if name in self.hidden else value}"
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
        fatal: object = None,  # noqa: ARG002  the protocol's
        meanwhile: object = None,  # noqa: ARG002
    ) -> Outcome[T]:
        """Work on one node after the other, so that the order of the output is fixed. None fails."""
        return Outcome({node: work(node) for node in (self.nodes if nodes is None else nodes)})

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


class CallRecorder:
    """Prints AWS calls as they are made, while it is switched on."""

    def __init__(self, show: Print) -> None:
        self._show = show
        self._lock = threading.Lock()  # Elastic IPs are allocated in parallel
        self._tags: dict[str, str] = {}  # of the cluster, once they have been printed
        self.on = False

    def __call__(self, service: str, method: str, params: Mapping[str, Any], answer: Any) -> None:
        with self._lock:
            for line in self._lines(service, method, params, answer) if self.on else ():
                self._show(line)

    def _lines(self, service: str, method: str, params: Mapping[str, Any], answer: Any) -> Iterator[str]:
        yield f"\naws {service} {''.join(word.capitalize() for word in method.split('_'))}"
        for name, value in params.items():
            if name == "TagSpecifications" and params.get("DryRun"):  # it has another cluster id
                yield "  TagSpecifications: as of the launch below"
            elif name == "TagSpecifications":
                yield from self._tag_lines(value)
            else:
                yield f"  {name}: {_shown(name, value)}"
        created = {key: answer[key] for key in ("GroupId", "KeyPairId", "AllocationId") if key in answer}
        if created:
            yield f"  -> {json.dumps(created)}"

    def _tag_lines(self, specifications: Sequence[Mapping[str, Any]]) -> Iterator[str]:
        """Yield which objects get tags; those of the cluster, the same in every call, once."""
        kinds: dict[str, list[str]] = {}
        for specification in specifications:
            tags = {tag["Key"]: tag["Value"] for tag in specification["Tags"]}
            if not self._tags:
                self._tags = tags
                yield "  the cluster's tags:"
                yield from (f"    {key}: {json.dumps(value)}" for key, value in tags.items())
            more = {key: value for key, value in tags.items() if self._tags.get(key) != value}
            also = f" and {json.dumps(more)}" if more else ""
            kinds.setdefault(f"with the cluster's tags{also}", []).append(specification["ResourceType"])
        for which, found in kinds.items():
            yield f"  TagSpecifications: {', '.join(found)} {which}"


def _shown(name: str, value: Any) -> str:
    if name == "UserData":
        what = "the first host key, and the timer that terminates the node at the deadline"
        return f"<{len(value)} bytes of cloud-config: {what}>"
    if isinstance(value, bytes):
        return value.decode()
    return json.dumps(value, default=str)


def up(console: Console, settings: Config) -> None:
    """Print what `up` would do."""
    with _dry_run(console, settings, "up") as (aws, recorder):
        recorder.on = True
        plan, _ = _bring_up(console, aws, settings, show=True)
        recorder.on = False
        console.print_text(f"\n{plan}\n\n# End of the dry run. Nothing was started; nothing costs anything.")


def launch(console: Console, settings: Config, script: Script, root: Path) -> None:
    """Print what `launch` would do on a new cluster of these settings."""
    with _dry_run(console, settings, "launch") as (aws, recorder):
        plan, runner = _bring_up(console, aws, settings, show=False)
        console.print_text(f"\n{plan}")
        recorder.on = True
        found = lookup.get(aws, settings.cluster.name)
        recorder.on = False
        starting.launch(
            replace(runner, cluster=found, show=console.print, hidden=settings.job.env),
            found,
            settings,
            NewJob(script),
            project_files.of_config(root, settings),
            progress=lambda text: console.print(f"\n# {console.render(text)}"),
            sources={one.source: f"{one.source}:/" for one in settings.shared},
        )
        console.print("\n# End of the dry run. Nothing was started.")


@contextlib.contextmanager
def _dry_run(console: Console, settings: Config, verb: str) -> Iterator[tuple[AWS, CallRecorder]]:
    """Yield an AWS that is moto, and what prints the calls to it."""
    spec = settings.cluster
    with contextlib.ExitStack() as stack:
        try:
            # moto takes 0.5 s to import, is only needed here and by the simulator, and may not be installed.
            from cloudddp.simulator import aws as simulated

            stack.enter_context(simulated.rehearse(spec.instance_profile or ""))
        except ImportError:
            raise CloudDDPError(
                "--dry-run needs moto", hint="pip install 'cloudddp[sim]' (in a clone: pip install '.[sim]')"
            ) from None
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="cloudddp-dry-run-"))
        os.environ["CLOUDDDP_HOME"] = folder  # `rehearse` restores the environment
        console.print(f"# Dry run of `{verb}`: nothing is called; ids, addresses and sizes are made up.")
        if spec.reservation:
            kind, zone = spec.types[0], spec.zones[0] if spec.zones else None
            zone = simulated.reserve(spec.reservation, instance_type=kind, count=spec.nodes, zone=zone)
            what = f"an on-demand reservation for {spec.nodes} x {kind} in {zone}"
            console.print(f"# Assumed: {spec.reservation} is {what}.")
        recorder = CallRecorder(console.print)
        yield AWS(region=spec.region, observe=recorder), recorder


def _bring_up(console: Console, aws: AWS, settings: Config, *, show: bool) -> tuple[str, PrintingRunner]:
    """Do what `up` does; return its plan, and the nodes. `show`: print what it does on them."""
    plan: list[str] = []
    left_out: list[str] = []
    made: list[PrintingRunner] = []
    info: list[TypeInfo] = []

    def progress(text: str) -> None:
        if not plan and isinstance(text, Excluded):
            left_out.append(f"  {text}")

    def agree(plans: Sequence[Plan], found: TypeInfo) -> None:
        for one in plans:
            ranks.nproc(settings.job, [one.context.info.gpus] * settings.cluster.nodes)
        info.append(found)
        plan.append("\n".join([lifecycle.plans(plans, found, settings.cluster), *left_out]))
        if show:
            console.print("\n# Here `up` shows the plan, which is at the end of this dry run, and asks.")

    def dial(created: Cluster, _: ClusterSpec, __: float, ___: Meanwhile) -> PrintingRunner:
        nodes = PrintingRunner(created, info[0].gpus, info[0].vcpus, info[0].max_efa)
        made.append(replace(nodes, show=console.print) if show else nodes)
        return made[-1]

    creating.up(
        [aws],
        settings.cluster,
        creating.Callbacks(progress, agree),
        reach=Reach(
            dial,
            lambda _: None,
            lambda aws, spec: ssh_sources(aws, spec, lambda: CALLER, lambda *_: JUMP_HOST),
        ),
    )
    return plan[0], made[-1]
