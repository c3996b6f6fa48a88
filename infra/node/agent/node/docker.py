"""Docker on this node: the command that runs a program in a container of the job, and the end of containers.

A container is an environment and not a security boundary: it has the network, the shared memory, the process
ids and the home folder of the node, so that the agent, which stays outside, treats ranks as without one.
Docker's client does not forward signals (a launcher would get each twice), and may end before its container
does: containers are known by their names, which are written down before they start.
"""

from __future__ import annotations

import getpass
import os
import re
import shlex
import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from agent.node import store
from agent.node.commands import run_quietly
from cloudddp.agent.protocol.gang import MAX_FACT
from cloudddp.agent.protocol.start import Container

# A path, since the variables of a job may have another PATH.
PROGRAM = shutil.which("docker") or "docker"
SOCKET = "/var/run/docker.sock"
DEVICES = ("/dev/infiniband", "/dev/gdrdrv")  # of EFA and of GDRCopy
DISK = "/opt/dlami/nvme"  # where copies of [[data]] are
# NVIDIA asks for the first two; the third is the kernel's own limit (fs.nr_open).
LIMITS = ("memlock=-1", "stack=67108864", "nofile=1048576")
NAMES = "containers"  # in a job's folder: the names of its containers, a line each
SECONDS = 60.0  # for Docker to remove containers
ECR = re.compile(r"\d{12}\.dkr\.ecr(-fips)?\.([a-z0-9-]+)\.amazonaws\.com(\.cn)?")
# Whether the image can run ranks. The project's folder, which comes first, may have a folder `torch`.
CHECK = """
import sys
sys.path.pop(0)
if sys.version_info < (3, 9):
    sys.exit("its Python is %d.%d, and ranks need 3.9" % sys.version_info[:2])
import importlib.util
if "torch" in sys.argv and not importlib.util.find_spec("torch"):
    sys.exit("it has no torch, and torchrun needs it")
"""


def allow() -> None:
    """Let the login user use Docker, if it may become root anyway. Some images of AWS leave that user out of
    the group docker, and a user that is added to it would be a member from its next login on."""
    if os.path.exists(SOCKET) and not os.access(SOCKET, os.R_OK | os.W_OK):
        run_quietly(["sudo", "-n", "chown", str(os.getuid()), SOCKET], SECONDS)


def id_of(image: str) -> str:
    """Return the id of an image that this node has; '' for another one."""
    return run_quietly([PROGRAM, "image", "inspect", "--format={{.Id}}", image]).strip()[:MAX_FACT]


def pull(image: str) -> str:
    """Return the shell command that pulls an image: from ECR with a token that never gets to the disk."""
    docker, registry = shlex.quote(PROGRAM), image.partition("/")[0]
    command = f"{docker} pull {shlex.quote(image)}"
    if not (found := ECR.fullmatch(registry)):
        return f"exec {command}"
    return (
        "set -o pipefail; export DOCKER_CONFIG=$(mktemp -d -p /dev/shm); "
        "trap 'rm -r \"$DOCKER_CONFIG\"' EXIT; "
        f"aws ecr get-login-password --region {found[2]} | "
        f"{docker} login --username AWS --password-stdin {registry} && {command}"
    )


def command(
    container: Container, words: Sequence[str], project: Path, env: Mapping[str, str], folder: Path
) -> tuple[list[str], dict[str, str]]:
    """Return the command that runs `words` in a container of the job in `folder`, as this user, and its
    environment: Docker gets variables by name, since values may be secret and arguments are public."""
    home, user = Path.home(), getpass.getuser()  # the image's /etc/passwd does not have it
    given = {
        "HOME": str(home),
        "USER": user,
        "LOGNAME": user,
        # `pip install` without root: a folder for each image, also where the image insists on a venv.
        "PYTHONUSERBASE": str(store.ROOT / "images" / container.image.replace(":", "-")),
        "PIP_BREAK_SYSTEM_PACKAGES": "1",
        **env,
    }
    name = f"cloudddp-{folder.name}-{time.monotonic_ns()}"
    with open(folder / NAMES, "a") as file:
        file.write(f"{name}\n")
    argv = [
        PROGRAM,
        *("run", "--rm", "--pull=never", "--sig-proxy=false", "--log-driver=none", f"--name={name}"),
        # No sudo of the image: root's files in the project could be neither replaced nor pulled.
        *("--network=host", "--ipc=host", "--pid=host", "--security-opt=no-new-privileges"),
        *(f"--ulimit={limit}" for limit in LIMITS),
        *(["--gpus=all"] if container.gpus else []),
        *(f"--device={device}" for device in DEVICES if os.path.exists(device)),
        *(f"--volume={path}:{path}" for path in (home, DISK) if os.path.exists(path)),
        *(f"--user={os.getuid()}:{os.getgid()}", f"--workdir={project}"),
        *(f"--env={variable}" for variable in sorted(given)),
        *(f"--entrypoint={words[0]}", container.image, *words[1:]),
    ]
    return argv, {**os.environ, **given}


def remove_noted(folder: Path) -> bool:
    """Remove the containers of a job, with their processes; return whether there were any."""
    try:
        names = store.read_bytes(folder / NAMES).decode(errors="replace").split()
    except OSError:
        return False
    run_quietly([PROGRAM, "rm", "--force", *names], SECONDS)
    (folder / NAMES).unlink(missing_ok=True)
    return True
