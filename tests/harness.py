"""Helpers of the tests: the command line as a real process, signals, waiting, and what is left in the account."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import pytest

ROOT = Path(__file__).parent.parent
TIMEOUT = 120  # a hang guard, not a measurement


def clean_environment(**extra: str) -> dict[str, str]:
    """The environment without anything that could reach an account, a cluster or a home of the developer's."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("AWS_", "CLOUDDDP_"))}
    kept["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{kept['PATH']}"
    kept.update(
        AWS_EC2_METADATA_DISABLED="true", AWS_CONFIG_FILE=os.devnull, AWS_SHARED_CREDENTIALS_FILE=os.devnull
    )
    return {**kept, "OMP_NUM_THREADS": "1", **extra}


@dataclass
class CommandLine:
    """`cloudddp` as a user runs it: a process, in a project folder, with its own cluster name."""

    cwd: Path
    cluster: str
    env: dict[str, str]
    started: list[subprocess.Popen[str]] = field(default_factory=list)

    def start(self, *words: str, **env: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-m", "cloudddp", *words],
            cwd=self.cwd,
            env={**self.env, **env},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            # A shell that runs the tests in the background has Ctrl-C ignored, and that is inherited.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
        self.started.append(process)
        return process

    def __call__(self, *words: str, **env: str) -> subprocess.CompletedProcess[str]:
        process = self.start(*words, **env)
        out, err = process.communicate(timeout=TIMEOUT)
        return subprocess.CompletedProcess(words, process.returncode, out, err)

    def ok(self, *words: str, **env: str) -> str:
        """Run, insist on success, return stdout."""
        done = self(*words, **env)
        assert done.returncode == 0, f"{words}: exit {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def write(self, name: str, text: str) -> Path:
        path = self.cwd / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    def end(self) -> None:
        for process in self.started:
            if process.poll() is None:
                process.kill()
                process.communicate()


@dataclass
class Remains:
    """What exists in the account of a cluster, seen by plain boto3."""

    instances: list[str]
    groups: list[str]
    keys: list[str]
    volumes: list[str]

    @property
    def nothing(self) -> bool:
        return not (self.instances or self.groups or self.keys or self.volumes)


def wait_for(what: Callable[[], Any], why: str) -> Any:
    """Poll until `what()` is true; fail saying `why` when it never becomes so."""
    deadline = time.monotonic() + TIMEOUT
    while time.monotonic() < deadline:
        if value := what():
            return value
        time.sleep(0.05)
    raise AssertionError(f"never happened: {why}")


def interrupt(process: subprocess.Popen[str], number: int = signal.SIGINT) -> tuple[int, str, str]:
    """Send a signal; return (exit code, stdout, stderr)."""
    process.send_signal(number)
    out, err = process.communicate(timeout=TIMEOUT)
    return process.returncode, out, err


def cannot(reason: str) -> NoReturn:
    """Skip the test for want of something; fail in CI, which has everything and must not hide a gap."""
    if os.environ.get("CI"):
        pytest.fail(f"missing in CI: {reason}")
    pytest.skip(reason)
