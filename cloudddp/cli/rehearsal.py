"""--dry-run: the verbs' own code against an in-process moto, with nodes that write down what they are told.

Nothing is called: no AWS, no SSH, no file outside a temporary folder. Ids and addresses are made up. The calls,
their parameters, the node commands and the price are the real ones, since the code that makes them is.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import struct
import tempfile
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from cloudddp.cli import clusters
from cloudddp.protocol import ApplyReply, ProbeReply, SetupReply, StartReply
from cloudddp.ranks import RANK_WRAPPER
from cloudddp.ssh import keys
from cloudddp.ssh.connection import Result
from cloudddp.ssh.fleet import Outcome

if TYPE_CHECKING:
    from cloudddp.aws.client import AWS
    from cloudddp.cluster import Cluster
    from cloudddp.ranks import Script
    from cloudddp.spec import ClusterSpec, Config
    from cloudddp.up import Up

T = TypeVar("T")
_WRAPPER = ["python3", "agent.py", "rank", "--"]  # keeps each rank's log and exit code
CALLER = "203.0.113.7/32"  # an address of the documentation range stands for this computer's own


class Nodes:
    """Stands for the SSH fleet: prints each command once for all nodes and answers as a healthy node would."""

    def __init__(
        self, cluster: Cluster, *, gpus: int, cpus: int, quiet: bool, hidden: Collection[str] = ()
    ) -> None:
        self._cluster = cluster
        self._hidden = hidden  # variables that the user set, whose values may be secret
        self._gpus, self._cpus = gpus, cpus
        self._quiet = quiet
        self._host_keys: dict[int, str] = {}

    def run(
        self,
        node: int,
        command: str,
        *,
        stdin: bytes | Iterable[bytes] = b"",
        command_timeout: float | None = 60.0,  # noqa: ARG002  the protocol's
        on_stdout: Callable[[bytes], None] | None = None,  # noqa: ARG002
        on_stderr: Callable[[bytes], None] | None = None,  # noqa: ARG002
        limit: int = 0,  # noqa: ARG002
        total_timeout: float | None = None,  # noqa: ARG002
    ) -> Result:
        data = stdin if isinstance(stdin, bytes) else b"".join(stdin)
        found = re.search(r"agent-[0-9a-f]+\.py (\w+)", command)
        step = found.group(1) if found else ""
        if not self._quiet:
            self._print(node, step, command, data)
        if "make-host-key" in command:
            return Result(0, keys.generate().public.encode(), b"")
        return Result(0, json.dumps(self._answer(step)).encode(), b"")

    def _print(self, node: int, step: str, command: str, data: bytes) -> None:
        instance = self._cluster.nodes[node]
        click.echo(f"\nnode {node} ({instance.public_ip}) $ {command}")
        if step == "start":
            for process in json.loads(data)["processes"]:
                _print_process(json.loads(data)["env"], process, self._hidden)
        elif step == "apply":
            (length,) = struct.unpack("!Q", data[:8])
            header = json.loads(data[8 : 8 + length])
            click.echo(
                f"  < {len(header['manifest'])} files, {len(data)} bytes as a tar stream; deletes {len(header['delete'])}"
            )
        elif step == "setup":
            for line in json.loads(data)["commands"]:
                click.echo(f"  < {line}")
        elif data:
            click.echo(f"  < {len(data)} bytes: {'the agent' if step else 'infra/node/host-key.sh'}")

    def _answer(self, step: str) -> Any:
        replies: dict[str, ProbeReply | ApplyReply | SetupReply | StartReply] = {
            "probe": ProbeReply(
                hostname="rehearsal", interface="ens5", gpus=self._gpus, cpus=self._cpus,
                python="/opt/pytorch/bin/python", free_port=29500, time=time.time(), disk_free=1 << 40,
                timer_state="active", timer_next="-", running=(), manifest={},
            ),
            "apply": ApplyReply(written=0, deleted=0),
            "setup": SetupReply(ran=True, exit_code=0, command="", output=""),
            "start": StartReply(pid=1),
        }  # fmt: skip
        return asdict(replies[step]) if step in replies else {}

    def each(
        self, work: Callable[[int], T], *, fatal: Callable[[Exception], bool] = lambda _: True
    ) -> Outcome[T]:
        """One node after another, so that the print-out has an order."""
        from cloudddp.errors import CloudDDPError

        outcome: Outcome[T] = Outcome()
        for node in range(len(self._cluster.nodes)):
            try:
                outcome.values[node] = work(node)
            except CloudDDPError as error:
                outcome.errors[node] = error
                if fatal(error):
                    break
        return outcome

    def host_key(self, node: int) -> str:
        """The key that the node would have shown; '' for the one of the user data."""
        return self._host_keys.get(node, "")

    def expect(self, node: int, host_key: str) -> None:
        self._host_keys[node] = host_key

    def reconnect(self, node: int) -> None:
        """Never broken."""

    def close(self) -> None:
        """Never open."""


def _print_process(shared: Mapping[str, str], process: Mapping[str, Any], hidden: Collection[str]) -> None:
    import shlex

    argv = [part for word in process["argv"] for part in (_WRAPPER if word == RANK_WRAPPER else [word])]
    click.echo("  starts: " + shlex.join(argv))
    for name, value in sorted({**shared, **process["env"]}.items()):
        click.echo(f"    {name}={'****' if name in hidden else value}")


@contextlib.contextmanager
def _rehearsed() -> Iterator[None]:
    from cloudddp.errors import CloudDDPError

    try:
        from cloudddp.sim import aws as simulated

        rehearsal = simulated.rehearse()
        rehearsal.__enter__()
    except ImportError:
        raise CloudDDPError(
            "--dry-run needs moto", hint="pip install 'cloudddp[sim]' (in a clone: pip install '.[sim]')"
        ) from None
    try:
        with tempfile.TemporaryDirectory(prefix="cloudddp-rehearsal-") as folder:
            os.environ["CLOUDDDP_HOME"] = folder  # the rehearsal puts the environment back
            yield
    finally:
        rehearsal.__exit__(None, None, None)


class Recorder:
    """Prints AWS calls as they are made, while it is switched on."""

    def __init__(self, *, on: bool) -> None:
        self.on = on

    def __call__(self, service: str, method: str, params: Mapping[str, Any], answer: Any) -> None:
        if not self.on:
            return
        operation = "".join(word.capitalize() for word in method.split("_"))
        click.echo(f"\naws {service} {operation}")
        for name, value in params.items():
            click.echo(f"  {name}: {_shown(name, value)}")
        made = {key: answer[key] for key in ("GroupId", "KeyPairId") if key in answer}
        if made:
            click.echo(f"  -> {json.dumps(made)}")


def _shown(name: str, value: Any) -> str:
    if name == "UserData":
        return f"<{len(value)} bytes of cloud-config: the first host key, and the timer that ends the node at the deadline>"
    if isinstance(value, bytes):
        return value.decode()
    return json.dumps(value, default=str)


def _aws(settings: Config, observe: Recorder) -> AWS:
    from cloudddp.aws.client import AWS

    return AWS(region=settings.cluster.region, observe=observe)


def _bring_up(aws: AWS, settings: Config, *, show: bool) -> Up:
    from cloudddp import up as making
    from cloudddp.aws import discover

    info: list[discover.TypeInfo] = []

    def agree(plan: Any, found: discover.TypeInfo) -> None:
        info.append(found)
        click.echo("\n" + clusters.describe_plan(plan, found, settings))

    def dial(made: Cluster, _: ClusterSpec, __: float, ___: Callable[[], None]) -> Nodes:
        return Nodes(made, gpus=info[0].gpus, cpus=info[0].vcpus, quiet=not show)

    return making.up(aws, settings.cluster, say=lambda _: None, agree=agree, dial=dial, caller=lambda: CALLER)


def _heading(what: str) -> None:
    click.echo(
        f"# Rehearsal of `{what}`: nothing is called; ids, addresses and sizes of answers are made up."
    )


def up(settings: Config) -> None:
    """Print what `up` would do."""
    with _rehearsed():
        _heading("up")
        _bring_up(_aws(settings, Recorder(on=True)), settings, show=True)
        click.echo("\n# End of the rehearsal. Nothing was started; nothing costs anything.")


def launch(settings: Config, script: Script, root: Path) -> None:
    """Print what `launch` would do on a fresh cluster of these settings."""
    from cloudddp import cluster, job
    from cloudddp.aws import discover

    with _rehearsed():
        _heading("launch")
        recorder = Recorder(on=False)
        aws = _aws(settings, recorder)
        _bring_up(aws, settings, show=False)
        recorder.on = True
        made = cluster.get(aws, settings.cluster.name)
        recorder.on = False
        info = discover.instance_type(aws, settings.cluster)
        nodes = Nodes(made, gpus=info.gpus, cpus=info.vcpus, quiet=False, hidden=settings.job.env)
        job.launch(
            nodes, made, settings, script,
            root=root, say=lambda text: click.echo(f"\n# {text}"), job_id=job.new_id(),
        )  # fmt: skip
        click.echo("\n# End of the rehearsal. Nothing was started.")


def down(settings: Config) -> None:
    """Print what `down` would do to a cluster of these settings."""
    from cloudddp import teardown
    from cloudddp.aws import inventory

    with _rehearsed():
        _heading("down")
        recorder = Recorder(on=False)
        aws = _aws(settings, recorder)
        _bring_up(aws, settings, show=False)
        recorder.on = True
        report = teardown.down(
            aws, inventory.named(settings.cluster.name), say=lambda text: click.echo(f"\n# {text}")
        )
        click.echo("\n" + clusters.describe_down(report, settings.cluster.name, simulated=True))
        click.echo("# End of the rehearsal. Nothing was removed.")
