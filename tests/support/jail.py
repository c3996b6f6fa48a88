"""A strict `docker`: it refuses what Docker would refuse, its containers outlive their clients, and see the
mounts that they were given, and of this computer its programs only.

`install` writes it into a folder for PATH. Only the options that cloudddp uses are known. An image whose name
has `no-such-image` cannot be pulled; in one with `no-torch` Python has no packages. The root folder of a
container needs root: without it (`jailed`) containers see all files.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import FrameType

from cloudddp.simulator.guest import docker
from cloudddp.simulator.linux import kernel

PROGRAMS = ("/usr", "/bin", "/sbin", "/lib", "/lib64", "/proc", "/dev", sys.prefix, sys.base_prefix)
CONTAINERS = Path.home() / ".simulated-containers"
_ROOT = Path(__file__).parents[2]
_OPTION = re.compile(
    r"--(rm|sig-proxy=false|pull=never|log-driver=none|(network|ipc|pid)=host|gpus=all|security-opt=no-new-privileges|"
    r"(name|ulimit|device|volume|user|workdir|env|entrypoint)=.*)",
    re.DOTALL,
)


def install(folder: Path, *, jailed: bool) -> Path:
    """Write the command into a folder, and return that."""
    folder.mkdir()
    path = folder / "docker"
    mode = "jailed" if jailed else "plain"
    path.write_text(
        f'#!/bin/sh\nPYTHONPATH={_ROOT}:{_ROOT}/tests exec {sys.executable} -S -m support.jail {mode} "$@"\n'
    )
    path.chmod(0o755)
    return folder


def _refuse(reason: str) -> int:
    print(f"docker: Error response from daemon: {reason}", file=sys.stderr)
    return 125  # docker-run(1): an error of Docker itself


def _run(words: list[str], earlier: list[list[str]], *, jailed: bool) -> int:
    end = next((k for k, word in enumerate(words) if not _OPTION.fullmatch(word)), len(words))
    options, (image, *arguments) = words[:end], words[end:] or [""]

    def given(name: str) -> list[str]:
        return [one.removeprefix(f"--{name}=") for one in options if one.startswith(f"--{name}=")]

    (name,), (folder,), (entry,) = given("name"), given("workdir"), given("entrypoint")
    mounts = [value.rpartition(":")[::2] for value in given("volume")]
    pulled = {docker.id_of(call[1]): call[1] for call in earlier if call[0] == "pull"}
    if image not in pulled:
        return _refuse(f"No such image, or unknown option: {image}")
    if (CONTAINERS / name).exists():
        return _refuse(f'Conflict. The container name "/{name}" is already in use')
    if missing := [source for source, _ in mounts if not Path(source).exists()]:
        return _refuse(f"bind source path does not exist: {missing[0]}")
    if not any(f"{folder}/".startswith(f"{target}/") for _, target in mounts):
        return _refuse(f"the working directory {folder} is in no mount")
    if given("gpus"):
        return _refuse('could not select device driver "" with capabilities: [[gpu]]')
    names = (*docker.KEPT, *given("env"))
    env = {"PATH": os.environ["PATH"], **{one: os.environ[one] for one in names if one in os.environ}}
    program = shutil.which(entry, path=env["PATH"])
    if program is None:
        print(f'docker: exec: "{entry}": executable file not found in $PATH', file=sys.stderr)
        return 127
    bare = ["-IS"] if "no-torch" in pulled[image] and "python" in entry else []
    enter = [sys.executable, str(Path(__file__)), "enter", json.dumps(mounts)] if jailed else []
    child = subprocess.Popen(
        [*enter, program, *bare, *arguments], env=env, cwd=folder, start_new_session=True
    )
    CONTAINERS.mkdir(exist_ok=True)
    (CONTAINERS / name).write_text(str(child.pid))

    def forward(number: int, _: FrameType | None) -> None:
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


def _enter(given: list[list[str]], argv: list[str]) -> None:
    """Replace this process by a command that sees these mounts only."""
    folder = Path.cwd()
    root = Path(os.environ["TMPDIR"]) / f"root-{os.getpid()}"
    root.mkdir()
    kernel.unshare(kernel.CLONE_NEWNS)
    kernel.mount("none", Path("/"), flags=kernel.MS_REC | kernel.MS_PRIVATE)
    kernel.mount("tmpfs", root, "tmpfs")
    pairs = [(path, path) for path in PROGRAMS if Path(path).exists()]
    for source, target in sorted([*pairs, *map(tuple, given)], key=lambda pair: len(pair[1])):
        (root / target[1:]).mkdir(parents=True, exist_ok=True)
        kernel.bind(Path(source), root / target[1:])
    (root / "tmp").mkdir(exist_ok=True)
    os.environ["TMPDIR"] = "/tmp"
    os.chroot(root)
    os.chdir(folder)
    os.execvp(argv[0], argv)  # noqa: S606


def main(mode: str, *words: str) -> int:
    if mode == "enter":
        _enter(json.loads(words[0]), list(words[1:]))
    if words[0] in ("pull", "image") and "no-such-image" in words[-1]:
        print(f"pull access denied for {words[-1]}, repository does not exist", file=sys.stderr)
        return 1
    if words[0] not in ("run", "rm"):
        return docker.main(list(words))
    earlier = docker.record(list(words))
    if words[0] == "rm":
        return _remove(list(words[2:]))
    return _run(list(words[1:]), earlier, jailed=mode == "jailed")


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
