"""The stand-ins for cloud-init and nvidia-smi as far as they need no node; all stand-ins refuse to run
outside one."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from support.harness import cannot

from cloudddp.cluster.user_data import Identity, user_data
from cloudddp.simulator.guest import cloud_init, devices, dispatch
from cloudddp.simulator.hosts import node_spec as parser
from cloudddp.simulator.hosts.namespaces import overlay

GPUS = [{"name": "NVIDIA A10G", "memory_mib": 22888, "seed": 7}] * 2


def our_user_data() -> str:
    now = datetime(2026, 11, 20, 12, tzinfo=UTC)
    return user_data(Identity("c", "k", "p", "q"), now, now + timedelta(hours=2))


def test_cloud_init_accepts_our_user_data(tmp_path: Path) -> None:
    if shutil.which("cloud-init") is None:
        cannot("cloud-init is not installed (Debian: apt-get install cloud-init)")
    path = tmp_path / "user-data"
    invalid = our_user_data().replace('"runcmd": [', '"write_file": 3, "runcmd": ["x", 3, ')
    for text, accepted in ((our_user_data(), True), (invalid, False)):
        path.write_text(text)
        command = ["cloud-init", "schema", "--config-file", str(path)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
        assert (done.returncode == 0) is accepted, done.stdout + done.stderr


def test_our_user_data_is_fully_supported() -> None:
    assert cloud_init.ignored(parser.parse(our_user_data().encode()).config) == []


def test_unsupported_directives_and_users_are_reported() -> None:
    config = {
        "packages": ["x"],
        "hostname": "y",
        "users": ["default", {"name": "ubuntu"}, {"name": "eve"}],
        "runcmd": [],
    }
    assert cloud_init.ignored(config) == ["hostname", "packages", "users: eve"]


@pytest.mark.parametrize(
    ("arguments", "lines"),
    [
        (
            ["--query-gpu=index,name", "--format=csv,noheader"],
            ["0, NVIDIA A10G (simulated)", "1, NVIDIA A10G (simulated)"],
        ),
        (["--query-gpu=memory.total", "--format=csv"], ["memory.total [MiB]", "22888 MiB", "22888 MiB"]),
    ],
)
def test_nvidia_smi_queries(
    arguments: list[str], lines: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert devices.answer_nvidia_smi(GPUS, arguments) == 0
    assert capsys.readouterr().out.splitlines() == lines
    for unknown in (["--query-gpu=nonsense", "--format=csv"], ["--query-gpu=name", "--format=xml"], ["-r"]):
        assert devices.answer_nvidia_smi(GPUS, unknown) != 0


@pytest.fixture(scope="module")
def stand_ins(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The stand-ins, as they are mounted over a node's /usr."""
    folder = tmp_path_factory.mktemp("overlay")
    overlay.create(folder)
    return folder


@pytest.mark.parametrize(
    "command",
    [
        ["systemctl", "poweroff"],
        *([name] for name in dispatch.SBIN),
        ["sudo", "true"],
        ["cloud-init", "status"],
        ["nvidia-smi", "-L"],
    ],
    ids=" ".join,
)
def test_stand_ins_refuse_outside_a_node(stand_ins: Path, tmp_path: Path, command: list[str]) -> None:
    """Runs in a pid namespace where available, so that a defect cannot shut this computer down."""
    name, *arguments = command
    sources = stand_ins / "lib/cloudddp-lab"
    code = (
        f"import sys; sys.path.insert(0, {str(sources)!r}); sys.argv = {[name, *arguments]!r}; from guest "
        "import dispatch; sys.exit(dispatch.main())"
    )
    done = _run_isolated([sys.executable, "-I", "-c", code], tmp_path)
    assert done.returncode not in (0, None)
    assert "acts on simulated nodes only" in done.stderr


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ("main(None)", "acts on simulated nodes only"),
        ("power('poweroff', force=False)", "not the init of a simulated node"),
        ("power('reboot', force=True)", "not the init of a simulated node"),
    ],
)
def test_init_refuses_outside_a_node(stand_ins: Path, tmp_path: Path, call: str, message: str) -> None:
    code = (
        f"import sys; sys.path.insert(0, {str(stand_ins / 'lib/cloudddp-lab')!r}); from guest import "
        f"init; sys.exit(init.{call})"
    )
    done = _run_isolated([sys.executable, "-I", "-c", code], tmp_path)
    assert done.returncode not in (0, None)
    assert message in done.stderr


def test_cloud_init_writes_nothing_outside_a_node(tmp_path: Path) -> None:
    written = tmp_path / "written"
    code = (
        "from cloudddp.simulator.guest import cloud_init\n"
        f"config = {{'write_files': [{{'path': {str(written)!r}}}], 'bootcmd': ['touch {written}']}}\n"
        "try: cloud_init.early(config, [], chown_to_user=print)\n"
        "finally: cloud_init.late(config, 'touch')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode not in (0, None)
    assert "refused" in done.stderr
    assert not written.exists()


def _run_isolated(argv: list[str], cwd: Path) -> subprocess.CompletedProcess[str]:
    isolated = (
        ["unshare", "--pid", "--fork", "--kill-child"] if os.getuid() == 0 and shutil.which("unshare") else []
    )
    return subprocess.run([*isolated, *argv], capture_output=True, text=True, timeout=300, cwd=cwd)
