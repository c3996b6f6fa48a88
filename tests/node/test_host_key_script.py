"""infra/node/host-key.sh on a real /etc/ssh, in a mount namespace of its own."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from support.harness import ROOT, cannot

SCRIPT = ROOT / "infra" / "node" / "host-key.sh"


@pytest.mark.parametrize("reload", [0, 1])
def test_key_is_installed_although_sshd_cannot_reload(tmp_path: Path, reload: int) -> None:
    """Debian's socket-activated sshd: "Cannot bind any address". The next connection starts one with the new
    key."""
    if os.getuid() != 0 or subprocess.run(["unshare", "--mount", "true"], check=False).returncode != 0:
        cannot("needs root and namespaces")
    folder, programs = tmp_path / "ssh", tmp_path / "bin"
    folder.mkdir()
    programs.mkdir()
    (programs / "systemctl").write_text(
        f'#!/bin/sh\necho "$*" >> {tmp_path}/calls\n[ $1 != reload ] || exit {reload}\n'
    )
    (programs / "systemctl").chmod(0o755)
    subprocess.run(
        ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "", "-f", folder / "ssh_host_ed25519_key"],
        check=True,
    )

    def step(name: str, key: str) -> subprocess.CompletedProcess[str]:
        inside = f'mount --bind {folder} /etc/ssh && PATH={programs}:$PATH sh {SCRIPT} "$@"'
        return subprocess.run(
            ["unshare", "--mount", "sh", "-c", inside, "sh", name, key],
            capture_output=True,
            text=True,
            timeout=60,
        )

    old = " ".join((folder / "ssh_host_ed25519_key.pub").read_text().split()[:2])
    new = step("make-host-key", old).stdout.strip()
    done = step("install-host-key", new)
    assert (done.returncode, done.stderr) == (0, "")
    assert (folder / "ssh_host_ed25519_key.pub").read_text().strip() == new != old
    assert "reload ssh" in (tmp_path / "calls").read_text()
