"""job.container: what each node is asked for, and why an image cannot be used. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping

from cloudddp.agent.protocol.machine import ProbeReply
from cloudddp.agent.protocol.start import Container, SetupReply
from cloudddp.config.spec import JobSpec
from cloudddp.errors import Message, NodeError
from cloudddp.text import one_line

PYTHON = "python3"  # of an image, where job.python is empty

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


def of_nodes(job: JobSpec, probes: Mapping[int, ProbeReply]) -> dict[int, Container]:
    """Return the container of each node; {} without job.container."""
    if job.container is None:
        return {}
    torch = job.rendezvous != "direct"
    return {node: Container(job.container, bool(one.gpus), torch) for node, one in probes.items()}


def error(node: int, reply: SetupReply, name: str) -> NodeError:
    """Return the error of a node whose image has failed: the line that there is a hint for, or the last."""
    lines = [one for one in reply.output.splitlines() if one.strip() and not one.startswith("Run 'docker")]
    known = ((line, hint) for pattern, hint in _HINTS.items() for line in lines if re.search(pattern, line))
    last = lines[-1] if lines else f"exit code {reply.exit_code}"
    line, hint = next(known, (last, "correct it and repeat the command"))
    return NodeError(f"node {node}: {name}: {one_line(line, 300)}", hint=hint)
