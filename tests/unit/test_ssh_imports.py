"""Which modules an SSH connection imports."""

from __future__ import annotations

import subprocess
import sys


def modules_after(code: str) -> set[str]:
    program = f"{code}\nimport sys\nprint(*sys.modules)"
    return set(
        subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, check=True
        ).stdout.split()
    )


def test_paramiko_is_imported_without_invoke() -> None:
    found = modules_after("from cloudddp.ssh import connection\nconnection.load_paramiko()")
    assert "paramiko" in found
    assert not {name for name in found if name.partition(".")[0] in ("invoke", "asyncio", "yaml")}


def test_invoke_can_be_imported_afterwards() -> None:
    found = modules_after("from cloudddp.ssh import connection\nconnection.load_paramiko()\nimport invoke")
    assert {"paramiko", "invoke.tasks"} <= found
