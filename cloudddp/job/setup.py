"""The setup of nodes before the ranks of a job start: shared folders, copies from S3, the container's image,
and the setup commands; and why it has failed."""

from __future__ import annotations

import re
import shlex
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from cloudddp.agent import client
from cloudddp.agent.client import Runner
from cloudddp.agent.protocol.start import Container, DataCopy, SetupReply, SetupRequest, SharedFolder
from cloudddp.cluster.connect import PROJECT
from cloudddp.config import package_inputs, packages
from cloudddp.config.package_inputs import PackageInputs
from cloudddp.config.packages import NO_PIP, download, takes_wheels
from cloudddp.config.spec import NODE_0, Config, JobSpec, SetupSpec, SharedSpec
from cloudddp.errors import Interrupted, Message, NodeError, StepWarning
from cloudddp.job.cancel import abort_launch
from cloudddp.job.follow.lines import LineSplitter
from cloudddp.job.job_request import NewJob
from cloudddp.job.project_files import ProjectFiles
from cloudddp.job.ranks import LaunchNode
from cloudddp.job.sync import Progress
from cloudddp.text import one_line

OnSetupLine = Callable[[int, str], None]  # node, line

Sources = Mapping[str, str]
"""Id of a file system -> its source, as mount(8) takes it (aws/file_systems.py)."""

_NO_INDEX = re.compile(
    r"simulated node: there is no package index|name resolution|NewConnectionError|Network is unreachable|"
    r"ConnectTimeout|dns error|error sending request|Temporary failure resolving"
)
_KEPT = re.compile(r"The user requested \(constraint\) torch==(\S+)")
_WANTED = re.compile(r"(\S{1,80} \S{1,40} depends on torch\b.*|The user requested torch\b.*)")
_PYTHON = re.compile(
    r"resolved to Python (\S+), which is incompatible with the project's Python requirement: `([^`]+)`|"
    r"requires a different Python: (\S+) not in '([^']+)'"
)
_MISSING = re.compile(r"No matching distribution found for ([^\n(]+)| and you require (.+?), we can")
_BUILD = re.compile(r"did not run successfully|Failed (?:to build|building)")
_BUILT = re.compile(r"(?:Processing|Obtaining(?: file://\S+/project)?|Failed to build) [./`']*([\w./-]+)")
_ERROR = re.compile(r"^\s*(\w+Error\b.*|error: command .*)", re.MULTILINE)
_NO_PIP = re.compile(
    r"(pip3?|python|uv): (command )?not found|externally-managed-environment|No module named '?pip"
    r"|ensurepip is not\s+available"
)

# In a line of Docker, of the AWS CLI or of the agent's check (agent/node/docker.py) -> what to do.
_HINTS: Mapping[str, str] = {
    "(docker|aws): (command )?not found|select device driver": (
        "use the Deep Learning AMI, or install Docker, NVIDIA's Container Toolkit and, for ECR, the AWS CLI"
    ),
    "connect to the Docker daemon": Message(
        "`cloudddp exec -- 'sudo systemctl start docker && sudo usermod -aG docker $USER'` starts it, and "
        "lets the login user use it"
    ),
    "no space left on device": Message("create the cluster with a larger disk: `cloudddp up --disk-gb GIB`"),
    "credentials|AccessDenied|authoriz|basic auth|denied|manifest|resolve reference|exec format": (
        "correct job.container, for the nodes' CPU architecture; nodes log in to ECR only, with the role of "
        "cluster.instance_profile (infra/iam/container.json)"
    ),
    "executable file|no such file|its Python|no torch": (
        "it needs bash for [setup], Python 3.9 or newer (job.python is its path in the image), and PyTorch "
        "unless ranks start without torchrun: --rendezvous direct"
    ),
}


def set_up(
    runner: Runner,
    nodes: Sequence[LaunchNode],
    config: Config,
    job: NewJob,
    files: ProjectFiles,
    progress: Progress,
    on_line: OnSetupLine,
) -> None:
    """Run the setup where it has not run yet, and note the images' ids. Raises NodeError, Interrupted."""
    copied = [one.source for one in config.data if one.is_s3]
    if copied:
        progress(f"copying {', '.join(copied)} where it differs")
    if config.job.container:
        progress(f"pulling {config.job.container} where it is missing")
    if config.setup.run:
        progress("running the setup commands where they have not run yet")
    if config.shared:
        progress(f"mounting {', '.join(one.place for one in config.shared)} on all nodes")
    if not (copied or config.setup.run or config.job.container or config.shared):
        return

    read = package_inputs.read(files.root, config.setup)
    inputs = [one for one in sorted(files.manifest) if read.has(one, is_data=files.is_data(one))]
    urls = ((one.source.removeprefix("s3://").partition("/"), one.place) for one in config.data if one.is_s3)
    data = tuple(DataCopy(bucket, prefix.strip("/"), place) for (bucket, _, prefix), place in urls)
    requests = {
        node.rank: SetupRequest(
            job=job.id,
            node=node.rank,
            project=PROJECT,
            script=job.script.shown,
            commands=tuple(config.setup.run),
            inputs=tuple(dict.fromkeys((*inputs, *config.setup.inputs))),
            env=dict(config.job.env),
            python=config.job.python,  # which a command may create
            paths=config.data_paths,
            data=data,
            container=node.container,
            shared=node.shared,
        )
        for node in nodes
    }
    # What a node exports is there before others mount it.
    first = {
        node: replace(one, commands=(), inputs=(), data=(), container=None)
        for node, one in requests.items()
        if any(folder.clients for folder in one.shared)
    }
    try:
        replies = _run(runner, first, on_line) if first else {}
        if not any(reply.exit_code or reply.cancelled for reply in replies.values()):
            replies = _run(runner, requests, on_line)
    except Exception:  # the other nodes continue with it
        abort(runner, job.id, progress)
        raise
    if any(reply.cancelled for reply in replies.values()):
        raise Interrupted(
            f"job {job.id} was cancelled during its setup", hint="`cloudddp launch SCRIPT` starts it again"
        )
    for rank, reply in replies.items():
        if reply.exit_code:
            raise _error(rank, reply, config, read)
    for node in nodes:
        if node.container is not None:
            image = replies[node.rank].image or node.container.image
            node.container = replace(node.container, image=image)


def abort(runner: Runner, job_id: str, progress: Progress) -> None:
    """Stop what has started, and name the nodes on which that may not have succeeded."""
    for node in abort_launch(runner, job_id):
        progress(StepWarning(f"job {job_id} may still run on node {node}; cancel it before the next launch"))


def _run(runner: Runner, requests: Mapping[int, SetupRequest], on_line: OnSetupLine) -> dict[int, SetupReply]:
    splitters = {node: LineSplitter() for node in requests}
    lock = threading.Lock()  # each node has a thread of its own

    def show(node: int, data: bytes, *, last: bool = False) -> None:
        with lock:
            for line in splitters[node].feed(data, last=last):
                on_line(node, line)

    try:
        return client.call_all(runner, requests, timeout=None, on_stderr=show)
    finally:
        for node in requests:
            show(node, b"", last=True)


def _error(node: int, reply: SetupReply, config: Config, read: PackageInputs) -> NodeError:
    """Return the error for a setup that failed. Its output was shown as it was written."""
    if reply.image:
        return container_error(node, reply, config.job.container or "")
    command = one_line(reply.command)
    if reply.data:
        last = reply.output.strip().rpartition("\n")[2] or f"exit code {reply.exit_code}"
        why = one_line(last.removeprefix(f"{command.rstrip('/')}: "), 400)
        if command.startswith("[[shared]]"):
            hint = (
                "give an --image that has what is missing; or `cloudddp up`, correct it with `cloudddp exec "
                "-- COMMAND`, then launch"
            )
            return NodeError(f"node {node}: {command} was not mounted: {why}", hint=Message(hint))
        hint = "correct [[data]] in cloudddp.toml, or the role of cluster.instance_profile, and repeat"
        return NodeError(f"node {node}: {command} was not copied: {why}", hint=f"{hint} the command")
    listed = config.setup.environment
    if listed and reply.command.startswith(packages.title(listed)):
        return install_error(node, reply, config.setup, read)
    hint = "fix it in [setup] of cloudddp.toml and repeat the command"
    if _NO_PIP.search(reply.output):
        names = '[setup] environment = "requirements.txt" installs them'
        hint = f"list the packages in requirements.txt: {names}"
    what = f"node {node}: setup command exited with code {reply.exit_code}: {command}"
    return NodeError(what, hint=_read_only(reply) if reply.read_only else hint)


def container_of(job: JobSpec, *, gpus: int) -> Container | None:
    """Return job.container for a node with so many GPUs."""
    return None if job.container is None else Container(job.container, bool(gpus), job.rendezvous != "direct")


def container_error(node: int, reply: SetupReply, name: str) -> NodeError:
    """Return the error of a node whose image has failed: the line that there is a hint for, or the last."""
    lines = [
        line for line in reply.output.splitlines() if line.strip() and not line.startswith("Run 'docker")
    ]
    known = ((line, hint) for pattern, hint in _HINTS.items() for line in lines if re.search(pattern, line))
    last = lines[-1] if lines else f"exit code {reply.exit_code}"
    line, hint = next(known, (last, "correct it and repeat the command"))
    return NodeError(f"node {node}: {name}: {one_line(line, 300)}", hint=hint)


def shared_folders(
    shared: tuple[SharedSpec, ...], addresses: Mapping[int, str], sources: Sources
) -> dict[int, tuple[SharedFolder, ...]]:
    """Return the shared folders of each node. The first one owns what is in them, and exports those of
    `source = "node0"` to the `addresses` of the others."""
    first = min(addresses)
    others = tuple(address for node, address in sorted(addresses.items()) if node != first)

    def of_node(one: SharedSpec, node: int) -> SharedFolder:
        owned = node == first
        if one.source != NODE_0:
            return SharedFolder(one.place, sources[one.source], owned=owned)
        if owned:
            return SharedFolder(one.place, below=one.place, clients=others, owned=True)
        return SharedFolder(one.place, f"{addresses[first]}:/", below=one.place)

    return {node: tuple(of_node(one, node) for one in shared) for node in addresses}


# -- packages, from what pip or uv wrote ---------------------------------------------------------------------


def install_error(node: int, reply: SetupReply, setup: SetupSpec, inputs: PackageInputs) -> NodeError:
    """Return the error for a command that has not installed `setup.environment`."""
    why, hint = ("", _read_only(reply)) if reply.read_only else _reason(reply.output, setup, inputs)
    return NodeError(
        f"node {node}: the packages of {setup.environment} were not installed "
        f"(exit code {reply.exit_code}){': ' if why else ''}{one_line(why, 300)}",
        hint=hint or f"correct {setup.environment} or [setup], and repeat the command",
    )


def _reason(text: str, setup: SetupSpec, inputs: PackageInputs) -> tuple[str, str]:
    """Return the reason, and what to do; '' for what is not known."""
    no_pip, wheels = NO_PIP in text, setup.wheels
    other = "choose an image with it (--image, or [job] container)"
    if found := _KEPT.search(text):
        wanted = f"{one[1]}, and " if (one := _WANTED.search(text)) else ""
        return (
            f"{wanted}torch {found[1]} of the image is kept",
            f"name the version of torch in {setup.environment}, which then replaces it, or {other}",
        )
    if found := _PYTHON.search(text):
        here, wanted = found[1] or found[3], found[2] or found[4]
        return f"they need Python {wanted}, and the nodes have {here}", f"change requires-python, or {other}"
    if not wheels and (no_pip or _NO_INDEX.search(text)) and takes_wheels(setup.environment or ""):
        fills = f"on this computer `{download(setup, inputs)}`, and in cloudddp.toml [setup] "
        return NO_PIP if no_pip else "nodes reach no package index", f'{fills}wheels = "wheels"'
    if (found := _MISSING.search(text)) or no_pip:
        name = one_line((found[1] or found[2]).strip(), 200) if found else "pip"
        if not wheels:
            return f"no {name} was found", ""
        adds = f"`pip download -d {shlex.quote(wheels)} {shlex.quote(name)}` adds it"
        return f"{wheels} has no {name} for the Python and platform of the nodes", adds
    if _BUILD.search(text):
        name = one_line((_BUILT.findall(text) or ["a package"])[-1], 200)
        why = ": ".join((f"{name} does not build", *_ERROR.findall(text)[-1:]))
        return why, f"correct {name}, and repeat the command"
    return "", ""


def _read_only(reply: SetupReply) -> str:
    folder = one_line(shlex.quote(reply.read_only))
    first = f'put "sudo chown -R $USER {folder}" first in [setup] run'
    return f"the login user may not write to {folder}: {first}"
