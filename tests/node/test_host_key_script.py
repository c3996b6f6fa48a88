"""infra/node/host-key.sh on a real /etc/ssh, in a mount namespace of its own."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from support.harness import ROOT
from support.namespaces import as_root

SCRIPT = ROOT / "infra" / "node" / "host-key.sh"


@pytest.mark.parametrize(
    ("active", "code", "expected"),
    [
        (("ssh",), 0, ["reload ssh"]),
        (("ssh",), 1, ["reload ssh"]),  # the laptop checks the key
        (("sshd",), 0, ["reload sshd"]),  # Amazon Linux
        # systemd may wait 90 s for a reload of a sshd that a socket has started: it cannot bind its address.
        (("ssh", "ssh.socket"), 0, ["stop ssh.service"]),
        (("sshd.socket",), 1, ["stop sshd.service"]),  # one sshd for each connection: nothing to stop
        ((), 0, []),
    ],
)
def test_sshd_uses_the_new_key(
    tmp_path: Path, active: tuple[str, ...], code: int, expected: list[str]
) -> None:
    alone = as_root("--mount")
    folder, programs = tmp_path / "ssh", tmp_path / "bin"
    folder.mkdir()
    programs.mkdir()
    (programs / "systemctl").write_text(
        f"#!/bin/sh\nif [ $1 = is-active ]; then for unit in {' '.join(active)}; do\n"
        f'[ $3 != $unit ] || exit 0; done; exit 3; fi\necho "$*" >> {tmp_path}/calls; exit {code}\n'
    )
    (programs / "systemctl").chmod(0o755)
    subprocess.run(
        ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "", "-f", folder / "ssh_host_ed25519_key"],
        check=True,
    )

    def step(name: str, key: str) -> subprocess.CompletedProcess[str]:
        inside = f'mount --bind {folder} /etc/ssh && PATH={programs}:$PATH sh {SCRIPT} "$@"'
        return subprocess.run(
            [*alone, "sh", "-c", inside, "sh", name, key],
            capture_output=True,
            text=True,
            timeout=60,
        )

    old = " ".join((folder / "ssh_host_ed25519_key.pub").read_text().split()[:2])
    new = step("make-host-key", old).stdout.strip()
    done = step("install-host-key", new)
    assert (done.returncode, done.stderr) == (0, "")
    assert (folder / "ssh_host_ed25519_key.pub").read_text().strip() == new != old
    calls = tmp_path / "calls"
    assert (calls.read_text().splitlines() if calls.exists() else []) == expected
