"""A `docker` whose containers see the mounts that they were given, and of this computer its programs only.

`install` writes it into a folder for PATH. It is the simulator's docker, with a root folder of its own for
each container; that needs root.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from cloudddp.simulator.guest import docker
from cloudddp.simulator.linux import kernel

MOUNTS = "JAIL_MOUNTS"
PROGRAMS = ("/usr", "/bin", "/sbin", "/lib", "/lib64", "/proc", "/dev", sys.prefix, sys.base_prefix)
_ROOT = Path(__file__).parents[2]


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


def _jail(words: list[str]) -> list[str]:
    """Return the arguments of `docker run` with which it enters the container's root folder first."""
    at = next(k for k, word in enumerate(words) if word.startswith("--entrypoint="))
    entry = words[at].partition("=")[2]
    os.environ[MOUNTS] = json.dumps([one.partition("=")[2] for one in words if one.startswith("--volume=")])
    inside = [f"--env={MOUNTS}", f"--entrypoint={sys.executable}"]
    return [*words[:at], *inside, words[at + 1], str(Path(__file__)), entry, *words[at + 2 :]]


def _enter(argv: list[str]) -> None:
    """Replace this process by a command that sees its mounts only."""
    folder = Path.cwd()
    root = Path(os.environ["TMPDIR"]) / f"root-{os.getpid()}"
    root.mkdir()
    kernel.unshare(kernel.CLONE_NEWNS)
    kernel.mount("none", Path("/"), flags=kernel.MS_REC | kernel.MS_PRIVATE)
    kernel.mount("tmpfs", root, "tmpfs")
    pairs = [(path, path) for path in PROGRAMS if Path(path).exists()]
    given = [tuple(one.split(":")) for one in json.loads(os.environ.pop(MOUNTS))]
    for source, target in sorted({*pairs, *given}, key=lambda pair: len(pair[1])):
        (root / target[1:]).mkdir(parents=True, exist_ok=True)
        kernel.bind(Path(source), root / target[1:])
    (root / "tmp").mkdir(exist_ok=True)
    os.environ["TMPDIR"] = "/tmp"
    os.chroot(root)
    os.chdir(folder)
    os.execvp(argv[0], argv)  # noqa: S606


if __name__ == "__main__":
    if sys.argv[1] not in ("jailed", "plain"):
        _enter(sys.argv[1:])
    words = sys.argv[2:]
    sys.exit(docker.main(_jail(words) if sys.argv[1] == "jailed" and words[0] == "run" else words))
