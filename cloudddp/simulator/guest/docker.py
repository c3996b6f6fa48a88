"""The command docker: a container is a process of the node, with the variables that --env names and no other.

There are no images: programs are those of the node. Each call is a line of JSON in ~/.simulated-docker.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from pathlib import Path

# By which the simulator finds the processes of a node, and which make its Python a node's.
KEPT = ("CLOUDDDP_SIM_HOME", "CLOUDDDP_SIM_NODE", "CLOUDDDP_METADATA", "PYTHONPATH", "TMPDIR")


def record(arguments: list[str]) -> list[list[str]]:
    """Record a call, and return those before it."""
    with (Path.home() / ".simulated-docker").open("a+") as calls:
        calls.seek(0)
        earlier = [json.loads(line) for line in calls]
        calls.write(json.dumps(arguments) + "\n")
    return earlier


def id_of(image: str) -> str:
    return f"sha256:{hashlib.sha256(image.encode()).hexdigest()}"


def main(arguments: list[str]) -> int:
    """Answer a call. Returns Docker's exit code."""
    earlier, verb, image = record(arguments), arguments[0], arguments[-1]
    if verb == "run":
        return _run(arguments[1:])
    if verb == "pull":
        print(f"{image}: simulated: nothing is pulled, and containers have the programs of this node")
    if verb == "image":
        if ["pull", image] not in earlier:
            return 1
        print(id_of(image))
    return 0  # rm: containers end with their clients


def _run(words: list[str]) -> int:
    """Become what `docker run` was given. Returns Docker's exit code where there is no such program."""
    end = next(k for k, word in enumerate(words) if not word.startswith("--"))
    (entry,) = (word.partition("=")[2] for word in words[:end] if word.startswith("--entrypoint="))
    names = [word.partition("=")[2] for word in words[:end] if word.startswith("--env=")]
    env = {name: os.environ[name] for name in (*KEPT, *names) if name in os.environ}
    path = f"/opt/pytorch/bin:{os.environ['PATH']}"  # namespace nodes have Python's packages there
    try:
        os.execvpe(entry, [entry, *words[end + 1 :]], {"PATH": path, **env})  # noqa: S606
    except OSError:
        print(f'docker: exec: "{entry}": executable file not found in $PATH', file=sys.stderr)
        return 127


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
