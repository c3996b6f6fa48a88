"""The command docker: a container is a process of the node, which has what `docker run` was given.

There are no images: a command runs with the node's programs, in the given folder, with the variables that
--env names and no other. Options that cloudddp does not use are refused, and so are sources of mounts that do
not exist. An image whose name has `no-such-image` cannot be pulled; in one with `no-torch` Python has no
packages. Each call is a line of JSON in ~/.simulated-docker/calls.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

from . import on_node

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

FOLDER = Path.home() / ".simulated-docker"
IMAGES, CONTAINERS = FOLDER / "images", FOLDER / "containers"
_OPTION = re.compile(
    r"--(rm|sig-proxy=false|pull=never|log-driver=none|(network|ipc|pid)=host|gpus=all|"
    r"(name|ulimit|device|volume|user|workdir|env|entrypoint)=.*)",
    re.DOTALL,
)
# By which the simulator finds the processes of a node, and which make its Python a node's.
_KEPT = ("CLOUDDDP_SIM_HOME", "CLOUDDDP_SIM_NODE", "CLOUDDDP_METADATA", "PYTHONPATH", "TMPDIR")


def main(arguments: list[str]) -> int:
    """Answer a call. Returns Docker's exit code."""
    for folder in (IMAGES, CONTAINERS):
        folder.mkdir(parents=True, exist_ok=True)
    with (FOLDER / "calls").open("a") as calls:
        calls.write(json.dumps(arguments) + "\n")
    verb, rest = (arguments or [""])[0], arguments[1:]
    if verb == "run":
        return _run(rest)
    if verb == "pull" and len(rest) == 1:
        return _pull(rest[0])
    if verb == "image" and rest[:2] == ["inspect", "--format={{.Id}}"] and len(rest) == 3:
        found = _image(rest[2])
        print(found or f"Error: No such image: {rest[2]}", file=sys.stdout if found else sys.stderr)
        return 0 if found else 1
    if verb == "rm" and rest[:1] == ["--force"]:
        return _remove(rest[1:])
    print(f"docker (simulated node): unsupported: {' '.join(arguments)}", file=sys.stderr)
    return 1


def _image(name: str) -> str:
    """Return the id of an image that was pulled, by its name or id; '' for none."""
    found = (
        f"sha256:{one.name}" for one in IMAGES.iterdir() if name in (one.read_text(), f"sha256:{one.name}")
    )
    return next(found, "")


def _pull(image: str) -> int:
    if "no-such-image" in image:
        print(
            f"Error response from daemon: pull access denied for {image}, repository does not exist or may "
            "require 'docker login'",
            file=sys.stderr,
        )
        return 1
    (IMAGES / hashlib.sha256(image.encode()).hexdigest()).write_text(image)
    print(f"{image}: simulated: nothing is pulled, and containers have the programs of this node")
    return 0


def _refuse(reason: str) -> int:
    print(f"docker: Error response from daemon: {reason}", file=sys.stderr)
    return 125  # docker-run(1): an error of Docker itself


def _run(words: list[str]) -> int:
    end = next((k for k, word in enumerate(words) if not _OPTION.fullmatch(word)), len(words))
    options, (called, *arguments) = words[:end], words[end:] or [""]

    def given(name: str) -> list[str]:
        return [one.removeprefix(f"--{name}=") for one in options if one.startswith(f"--{name}=")]

    image, (name,), (folder,), (entry,) = _image(called), given("name"), given("workdir"), given("entrypoint")
    mounts = [value.rpartition(":")[::2] for value in given("volume")]
    if not image:
        return _refuse(f"No such image, or unknown option (simulated node): {called}")
    if (CONTAINERS / name).exists():
        return _refuse(f'Conflict. The container name "/{name}" is already in use')
    if missing := [source for source, _ in mounts if not Path(source).exists()]:
        return _refuse(f"bind source path does not exist: {missing[0]}")
    if not any(f"{folder}/".startswith(f"{target}/") for _, target in mounts):
        return _refuse(f"the working directory {folder} is in no mount")
    if given("gpus") and subprocess.run(["nvidia-smi", "-L"], stdout=subprocess.DEVNULL).returncode:
        return _refuse('could not select device driver "" with capabilities: [[gpu]]')
    is_bare = "no-torch" in (IMAGES / image.removeprefix("sha256:")).read_text() and "python" in entry
    bare = ["-IS"] if is_bare else []
    own = "/opt/pytorch/bin:" if on_node.is_node() else ""
    env = {one: os.environ[one] for one in (*_KEPT, *given("env")) if one in os.environ}
    return _start(name, [entry, *bare, *arguments], folder, {"PATH": own + os.environ["PATH"], **env})


def _start(name: str, argv: list[str], folder: str, env: dict[str, str]) -> int:
    program = shutil.which(argv[0], path=env["PATH"])
    if program is None:
        print(f'docker: exec: "{argv[0]}": executable file not found in $PATH', file=sys.stderr)
        return 127
    child = subprocess.Popen([program, *argv[1:]], env=env, cwd=folder, start_new_session=True)
    (CONTAINERS / name).write_text(str(child.pid))

    def forward(number: int, _: Any) -> None:
        """With --pid=host a container is a child of its shim, and gets signals itself; here of this
        process."""
        child.send_signal(number)

    signal.signal(signal.SIGTERM, forward)
    code = child.wait()
    (CONTAINERS / name).unlink(missing_ok=True)
    return code if code >= 0 else 128 - code


def _remove(names: list[str]) -> int:
    for name in names:
        with contextlib.suppress(OSError):
            os.killpg(int((CONTAINERS / name).read_text()), signal.SIGKILL)
        (CONTAINERS / name).unlink(missing_ok=True)
    return 0
