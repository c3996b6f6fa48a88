"""job.container: what each node is asked for, and why an image cannot be used. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping

from cloudddp.agent.protocol.machine import ProbeReply
from cloudddp.agent.protocol.start import Container, SetupReply
from cloudddp.config.spec import JobSpec
from cloudddp.errors import Command, NodeError, Text
from cloudddp.text import one_line

PYTHON = "python3"  # of an image, where job.python is empty
_LONGEST = 300  # characters of Docker's own words

_AMI = "use the Deep Learning AMI, or install it"
# In the output of Docker, of the AWS CLI and of the agent's check (agent/node/docker.py) -> what is wrong,
# and what to do. {image} and {why}, the last line of the output, are put in.
_PROBLEMS: Mapping[str, tuple[str, Text]] = {
    r"(?m)docker: (command )?not found": ("Docker is not installed", _AMI),
    "Cannot connect to the Docker daemon": (
        "Docker's daemon does not run",
        (Command("exec", "--", "sudo systemctl start docker"), " starts it"),
    ),
    "permission denied while trying to connect": (
        "the login user may not use Docker, and sudo asks it for a password",
        ("add it to the group docker: ", Command("exec", "--", "sudo usermod -aG docker $USER")),
    ),
    "no space left on device": (
        "{image} does not fit on the disk",
        ("create the cluster with a larger one: ", Command("up", "--disk-gb", "GIB")),
    ),
    "could not select device driver": ("the NVIDIA Container Toolkit is missing", _AMI),
    r"aws: (command )?not found": ("the AWS CLI is missing, which logs in to ECR", _AMI),
    "Unable to locate credentials|AccessDenied|not authorized to perform|no basic auth": (
        "the role of cluster.instance_profile may not pull {image}",
        "infra/iam/container.json is the policy that it needs",
    ),
    "manifest unknown|repository .*not (found|exist)|failed to resolve reference|denied: |unauthorized": (
        "{image} does not exist, or needs a login",
        "correct job.container; the nodes log in to ECR only",
    ),
    "no matching manifest|exec format error": (
        "{image} is for another kind of processor",
        "choose an image for the instance type's architecture",
    ),
    r"stat \S+|executable file not found": (
        "{image} lacks a program: {why}",
        "it needs bash for [setup], and Python: set job.python to its path in the image",
    ),
    "it has no torch": (
        "{image} has no torch, and torchrun needs it",
        "use an image with PyTorch, or start ranks without torchrun: --rendezvous direct",
    ),
    r"its Python is \d": ("{image}: {why}", "ranks need Python 3.9 or newer there; set job.python"),
}


def of_nodes(job: JobSpec, probes: Mapping[int, ProbeReply]) -> dict[int, Container]:
    """Return the container of each node; {} without job.container."""
    if job.container is None:
        return {}
    torch = job.rendezvous != "direct"
    return {node: Container(job.container, bool(one.gpus), torch) for node, one in probes.items()}


def same_image(asked: Container, replies: Mapping[int, SetupReply]) -> None:
    """Raise NodeError where nodes have different images of one name: a tag has moved, and some have pulled it
    before."""
    nodes: dict[str, list[str]] = {}
    for node, reply in sorted(replies.items()):
        nodes.setdefault(reply.image, []).append(str(node))
    if len(nodes) > 1:
        listed = "; ".join(f"{one_line(image, 20)} on node {', '.join(on)}" for image, on in nodes.items())
        raise NodeError(
            f"{asked.image} is not the same image on all nodes: {listed}",
            hint=(Command("exec", "--", f"docker pull {asked.image}"), " gets the newest one everywhere"),
        )


def error(node: int, reply: SetupReply) -> NodeError:
    """Return the error of a node whose Docker or image has failed."""
    lines = [
        line for line in reply.output.splitlines() if line.strip() and not line.startswith("Run 'docker")
    ]
    why = one_line(lines[-1] if lines else f"exit code {reply.exit_code}", _LONGEST)
    for pattern, (what, hint) in _PROBLEMS.items():
        if re.search(pattern, reply.output):
            return NodeError(f"node {node}: {what.format(image=one_line(reply.image), why=why)}", hint=hint)
    return NodeError(
        f"node {node}: {one_line(reply.command)}: {why}", hint="correct it and repeat the command"
    )
