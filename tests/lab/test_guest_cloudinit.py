"""The stand-ins for cloud-init and nvidia-smi as far as they need no node; all stand-ins refuse to run
outside one."""

from __future__ import annotations

import base64
import gzip
import os
import shutil
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from support.harness import cannot

from cloudddp.cluster.user_data import Identity, user_data
from cloudddp.files import payload_text
from cloudddp.sim.guest import cloud_init, devices, dispatch
from cloudddp.sim.hosts import user_data as parser
from cloudddp.sim.hosts.machine import overlay

GPUS = [{"name": "NVIDIA A10G", "memory_mib": 22888, "seed": 7}] * 2


def our_user_data() -> str:
    texts = [payload_text(f"infra/node/cloudddp-deadline.{kind}") for kind in ("timer", "service")]
    now = datetime(2026, 11, 20, 12, tzinfo=UTC)
    return user_data(Identity("c", "k", "p", "q"), now, now + timedelta(hours=2), (texts[0], texts[1]))


def validate(path: Path) -> subprocess.CompletedProcess[str]:
    if shutil.which("cloud-init") is None:
        cannot("cloud-init is not installed (Debian: apt-get install cloud-init)")
    return subprocess.run(
        ["cloud-init", "schema", "--config-file", str(path)], capture_output=True, text=True, timeout=60
    )


def test_cloud_init_accepts_our_user_data(tmp_path: Path) -> None:
    path = tmp_path / "user-data"
    path.write_text(our_user_data())
    done = validate(path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Valid" in done.stdout


def test_cloud_init_rejects_invalid_user_data(tmp_path: Path) -> None:
    """So that the test above can fail."""
    path = tmp_path / "user-data"
    path.write_text(our_user_data().replace('"runcmd": [', '"write_file": 3, "runcmd": ["x", 3, '))
    assert validate(path).returncode != 0


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
    "encoding", [None, "", "text/plain", "b64", "base64", "gz+b64", "gzip+base64", "gz+base64"]
)
def test_write_files_encodings(encoding: str | None) -> None:
    text = "a\nü\x00"
    data = text.encode()
    if encoding and encoding.startswith("gz"):
        data = gzip.compress(data)
    content = base64.b64encode(data).decode() if encoding and "64" in encoding else text
    entry = {"path": "/x", "content": content} | ({} if encoding is None else {"encoding": encoding})
    assert cloud_init.content(entry) == text.encode()


@pytest.mark.parametrize(
    "entry",
    [{"encoding": "rot13"}, {"encoding": "b64", "content": "x"}, {"encoding": "gz+b64", "content": "eA=="}],
)
def test_undecodable_content_is_an_error(entry: dict[str, str]) -> None:
    with pytest.raises((ValueError, OSError, EOFError)):
        cloud_init.content({"path": "/x", **entry})


@pytest.mark.parametrize(("given", "mode"), [(None, 0o644), ("0600", 0o600), ("755", 0o755), (0o640, 0o640)])
def test_permissions_are_octal(given: str | int | None, mode: int) -> None:
    assert cloud_init.permissions(given) == mode


def test_commands_share_one_shell() -> None:
    script = cloud_init.shellify(["cd /usr; x='it'", ["printf", "%s", "a'b c", 3], 'echo "$x $PWD"', None])
    done = subprocess.run(["sh"], input=script, capture_output=True, text=True, timeout=60, cwd="/")
    assert done.stdout == "a'b c3it /usr\n", script


def test_command_must_be_string_or_list() -> None:
    with pytest.raises(TypeError, match="a string or a list"):
        cloud_init.shellify([{"a": "b"}])


def test_yaml_types_beyond_json() -> None:
    zipped = base64.b64encode(gzip.compress(b"hello")).decode()
    raw = (
        f"#cloud-config\nwrite_files:\n- path: /x\n  encoding: gzip\n  content: !!binary {zipped}\nwhen: "
        "2026-11-20\n1: 2\n"
    )
    config = parser.parse(raw.encode()).config
    assert cloud_init.content(config["write_files"][0]) == b"hello"
    assert (config["when"], config["1"]) == ("2026-11-20", 2)


@pytest.mark.parametrize(
    ("arguments", "lines"),
    [
        (
            ["--query-gpu=index,name", "--format=csv,noheader"],
            ["0, NVIDIA A10G (simulated)", "1, NVIDIA A10G (simulated)"],
        ),
        (["--query-gpu=memory.total", "--format=csv"], ["memory.total [MiB]", "22888 MiB", "22888 MiB"]),
        (["--query-gpu=memory.used,count", "--format=csv,noheader,nounits"], ["0, 2", "0, 2"]),
        (["--query-gpu=index, driver_version", "--format=csv, noheader"], ["0, simulated", "1, simulated"]),
    ],
)
def test_nvidia_smi_queries(
    arguments: list[str], lines: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert devices.answer_nvidia_smi(GPUS, arguments) == 0
    assert capsys.readouterr().out.splitlines() == lines


def test_nvidia_smi_lists_simulated_gpus(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert devices.answer_nvidia_smi(GPUS, ["-L"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(" (UUID")[0] for line in lines] == [
        f"GPU {n}: NVIDIA A10G (simulated)" for n in (0, 1)
    ]
    assert len(set(lines)) == 2


@pytest.mark.parametrize(
    "arguments", [["--query-gpu=nonsense", "--format=csv"], ["--query-gpu=name", "--format=xml"], ["-r"]]
)
def test_nvidia_smi_rejects_unknown_queries(arguments: list[str]) -> None:
    assert devices.answer_nvidia_smi(GPUS, arguments) != 0


# -- outside a node ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def stand_ins(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The stand-ins, as they are mounted over a node's /usr."""
    folder = tmp_path_factory.mktemp("overlay")
    overlay.create(folder)
    return folder


@pytest.mark.parametrize(
    "command",
    [
        *(
            ["systemctl", *words]
            for words in (["poweroff"], ["daemon-reload"], ["is-system-running"], ["start", "x"])
        ),
        *([name] for name in dispatch.SBIN),
        ["shutdown", "now"],
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
        "from cloudddp.sim.guest import cloud_init\n"
        f"config = {{'write_files': [{{'path': {str(written)!r}}}], 'bootcmd': ['touch {written}']}}\n"
        "try: cloud_init.early(config, [], chown_to_user=print)\n"
        "finally: cloud_init.late(config, 'touch')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode not in (0, None)
    assert "refused" in done.stderr
    assert not written.exists()


def _run_isolated(argv: list[str], cwd: Path) -> subprocess.CompletedProcess[str]:
    isolated = (
        ["unshare", "--pid", "--fork", "--kill-child"] if os.getuid() == 0 and shutil.which("unshare") else []
    )
    return subprocess.run([*isolated, *argv], capture_output=True, text=True, timeout=60, cwd=cwd)
