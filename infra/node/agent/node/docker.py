"""Docker on this node: the command that runs a program in a container of the job, and the end of containers.

A container is an environment, and no border: it has the network, the shared memory and the process ids of
the node. So the agent, which stays outside, signals each rank, reads its stacks and its CPU time, and finds
its processes by their mark as without a container; and the wrapper of a rank finds the agent. Docker's client
does not forward signals (a launcher would get each twice), and may end before its container does: containers
are known by their names, which are written down before they start.
"""

from __future__ import annotations

import contextlib
import getpass
import hashlib
import os
import re
import shlex
import shutil
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from agent.node import store
from agent.node.commands import run_quietly, succeeds
from cloudddp.agent.protocol.start import Container

SOCKET = "/var/run/docker.sock"
DEVICES = ("/dev/infiniband", "/dev/gdrdrv")  # of EFA and of GDRCopy
# Outside of the project there may be what it links to: copies of [[data]], shared folders, fast disks.
BESIDE = ("~/cloudddp-data", "~/cloudddp-shared", "/opt/dlami/nvme")
NAMES = "containers"  # in a job's folder: the names of its containers, a line each
FILES = 1 << 20  # the kernel's own limit of open files (fs.nr_open)
STACK = 64 << 20  # bytes: what NVIDIA asks for
SECONDS = 60.0  # for Docker to remove containers
PIP = {"PIP_BREAK_SYSTEM_PACKAGES": "1"}  # it installs in the home folder; the image may insist on a venv
ECR = re.compile(r"\d{12}\.dkr\.ecr(-fips)?\.([a-z0-9-]+)\.amazonaws\.com(\.cn)?")
# Whether the image can run ranks. The project's folder, which comes first, may have a folder `torch`.
CHECK = """
import sys
sys.path.pop(0)
if sys.version_info < (3, 9):
    sys.exit("its Python is %d.%d" % sys.version_info[:2])
import importlib.util
if "torch" in sys.argv and not importlib.util.find_spec("torch"):
    sys.exit("it has no torch")
"""


def program() -> str:
    """Return the path of Docker's client; where there is none, its name, which cannot be started."""
    return shutil.which("docker") or "docker"


def allow() -> None:
    """Let the login user use Docker, if it may become root anyway. Members of the group docker need nothing;
    a user that is added to it would be a member from its next login on."""
    if os.path.exists(SOCKET) and not os.access(SOCKET, os.R_OK | os.W_OK):
        succeeds(["sudo", "-n", "chown", str(os.getuid()), SOCKET], SECONDS)


def pull(image: str) -> str:
    """Return the shell command that pulls an image: from ECR with the node's role, whose token never gets to
    the disk."""
    docker, registry = shlex.quote(program()), image.partition("/")[0]
    command = f"{docker} pull {shlex.quote(image)}"
    if not (found := ECR.fullmatch(registry)):
        return f"exec {command}"
    return (
        "set -o pipefail; export DOCKER_CONFIG=$(mktemp -d -p /dev/shm); "
        "trap 'rm -r \"$DOCKER_CONFIG\"' EXIT; "
        f"aws ecr get-login-password --region {found[2]} | "
        f"{docker} login --username AWS --password-stdin {registry} && {command}"
    )


def home(container: Container) -> Path:
    """Return the folder that is the home folder in containers of this image. It is kept between jobs: caches,
    and what `pip install` puts there without root."""
    return store.ROOT / "container-home" / hashlib.sha256(container.image.encode()).hexdigest()[:12]


def user_variables() -> dict[str, str]:
    """Return the variables that name the user and its home: the image's /etc/passwd does not have it."""
    user = getpass.getuser()
    return {"HOME": str(Path.home()), "USER": user, "LOGNAME": user}


def command(
    container: Container, words: Sequence[str], project: Path, names: Iterable[str], name: str
) -> list[str]:
    """Return the command that runs `words` in a container called `name`, as this user, with the variables
    `names` of the command's own environment: values may be secret, and arguments are public."""
    mounts = _mounts(home(container), project)
    return [
        program(),
        *("run", "--rm", "--pull=never", "--sig-proxy=false", "--log-driver=none", f"--name={name}"),
        *("--network=host", "--ipc=host", "--pid=host"),
        *("--ulimit=memlock=-1", f"--ulimit=stack={STACK}", f"--ulimit=nofile={FILES}"),
        *(["--gpus=all"] if container.gpus else []),
        *(f"--device={device}" for device in DEVICES if os.path.exists(device)),
        *(f"--volume={source}:{target}" for source, target in mounts),
        *(f"--user={os.getuid()}:{os.getgid()}", f"--workdir={project}"),
        *(f"--env={variable}" for variable in sorted(names)),
        *(f"--entrypoint={words[0]}", container.id or container.image, *words[1:]),
    ]


def _mounts(own_home: Path, project: Path) -> list[tuple[str, str]]:
    """Return what a container sees of the node, at the same paths, and its home folder. Mount points in that
    are created here: Docker's would belong to root."""
    agent = os.path.abspath(sys.argv[0])
    beside = filter(os.path.exists, map(os.path.expanduser, BESIDE))
    same = sorted({str(project), str(store.ROOT), agent, *beside})
    for path in ("", *(os.path.relpath(one, Path.home()) for one in same)):
        if not path.startswith(".."):
            (own_home / path).mkdir(mode=0o700, parents=True, exist_ok=True)
    return [(str(own_home), str(Path.home())), *((path, path) for path in same)]


def note(folder: Path, name: str) -> str:
    """Write down in a job's folder that it has a container of this name, and return the name."""
    with open(folder / NAMES, "a") as file:
        file.write(f"{name}\n")
    return name


def remove_noted(folder: Path) -> bool:
    """Remove the containers of a job, with their processes; return whether there were any."""
    names: list[str] = []
    with contextlib.suppress(OSError):
        names = store.read_bytes(folder / NAMES).decode(errors="replace").split()
    if names:
        run_quietly([program(), "rm", "--force", *(one for one in names if one[0] != "-")], SECONDS)
        (folder / NAMES).unlink(missing_ok=True)
    return bool(names)
