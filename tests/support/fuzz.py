"""Runs the random cases of fuzz_cases.py, each in a folder and an environment of its own."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from support.fuzz_cases import Case, generate
from support.harness import TIMEOUT, clean_environment
from support.processes import Process, Zygote

_AT_ONCE = 3


def lay_out(case: Case, folder: Path) -> Path:
    """Create the folder of a case; return its current folder."""
    project = folder / "a" / "b" / "project"
    project.mkdir(parents=True)
    (project / "folder").mkdir()
    (project / "file").write_text("text\n")
    (project / "train.py").write_text("print(1)\n")
    (project / "main.py").write_text("print(1)\n")
    (project / "unreadable").touch(0o000)
    (project / "odd.toml").write_bytes(case.toml or b"[cluster\n")
    (project / "link").symlink_to("file")
    (project / "loop").symlink_to("loop")
    (project / "dangling").symlink_to("nowhere")
    (project / "null").symlink_to("/dev/null")
    os.mkfifo(project / "fifo")
    config = project / "cloudddp.toml"
    if case.toml is not None:
        config.write_bytes(case.toml)
    elif case.toml_is == "folder":
        config.mkdir()
    elif case.toml_is == "fifo":
        os.mkfifo(config)
    elif case.toml_is == "unreadable":
        config.touch(0o000)
    elif case.toml_is != "none":
        config.symlink_to({"loop": "cloudddp.toml", "dangling": "nowhere", "null": "/dev/null"}[case.toml_is])
    if case.git == "folder":
        (project / ".git").mkdir()
        (project / ".gitignore").write_bytes(case.toml or b"\xff\n[\n!\n")
    elif case.git == "file":
        (project / ".git").write_bytes(b"\xff")
    elif case.git == "loop":
        (project / ".git").symlink_to(".git")
    return project / case.cwd


def environment(case: Case, folder: Path, endpoint: str) -> dict[str, str]:
    mine: dict[str, str | None] = {
        **clean_environment(
            HOME=str(folder),
            CLOUDDDP_HOME=str(folder / "state"),
            CLOUDDDP_CHECKIP_URL=f"{endpoint}/address",
            AWS_ENDPOINT_URL=f"{endpoint}/{case.seed}",
            AWS_ACCESS_KEY_ID="x",
            AWS_SECRET_ACCESS_KEY="x",
            AWS_REGION="us-east-1",
            AWS_EC2_METADATA_DISABLED="true",
            AWS_CONFIG_FILE=os.devnull,
            AWS_SHARED_CREDENTIALS_FILE=os.devnull,
        ),
        **case.variables,
    }
    return {name: value for name, value in mine.items() if value is not None}


def outcomes(first: int, end: int, folder: Path, endpoint: str) -> Iterator[tuple[Case, int, str, str]]:
    """Run the cases; yield each with its exit code, stdout and stderr."""
    zygote = Zygote("moto.ec2.models", "tests.support.warm")  # what every case imports
    for begin in range(first, end, _AT_ONCE):
        cases = [generate(seed) for seed in range(begin, min(begin + _AT_ONCE, end))]
        started = [_start(zygote, case, folder / str(case.seed), endpoint) for case in cases]
        for case, process in zip(cases, started, strict=True):
            out, err = process.communicate(timeout=TIMEOUT)
            yield case, process.wait(), out, err


def _start(zygote: Zygote, case: Case, folder: Path, endpoint: str) -> Process:
    begin = lay_out(case, folder)
    (folder / "stdin").write_bytes(case.stdin)
    with (folder / "stdin").open("rb") as stdin:
        words = ("-m", "cloudddp", *case.words)
        return zygote.start(words, begin, environment(case, folder, endpoint), session=True, stdin=stdin)
