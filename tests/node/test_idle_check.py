"""What keeps an idle node (infra/node/cloudddp-idle.sh): real processes, in a process namespace where nothing
else runs."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from support.harness import cannot

from cloudddp.cluster.user_data import IDLE_CHECK, IdleGuard
from cloudddp.files import payload_text

ALONE = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]


@pytest.mark.parametrize(
    ("name", "keeps"),
    [
        ("ssm-session-worker", True),  # AWS's Session Manager; the kernel keeps 15 characters of it
        ("login", True),  # on a console; systems without utmp do not list it in `who`
        ("cloudddp-wait", True),
        ("agetty", False),
        ("amazon-ssm-agent", False),
    ],
)
def test_process_keeps_its_node(tmp_path: Path, name: str, keeps: bool) -> None:
    if os.getuid() != 0 or subprocess.run([*ALONE, "true"], check=False).returncode != 0:
        cannot("needs root and namespaces")
    program = tmp_path / name
    shutil.copy("/bin/sleep", program)
    guard = IdleGuard(
        300, 60, ssh_port=1, timer="", service="", check=payload_text("infra/node/cloudddp-idle.sh")
    )
    (text,) = [file["content"] for file in guard.files if file["path"] == IDLE_CHECK]
    check, used = tmp_path / "idle.sh", tmp_path / "cloudddp-in-use"
    check.write_text(text.replace("/run/", f"{tmp_path}/"))
    used.write_text(f"{float(Path('/proc/uptime').read_text().split()[0]) - 100:.0f}\n")
    before = used.read_text()
    script = f"{program} 60 & until [ /proc/$!/exe -ef {program} ]; do sleep 0.02; done; exec sh {check}"
    done = subprocess.run(
        [*ALONE, "sh", "-c", script], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stderr == ""
    assert (used.read_text() != before) is keeps
