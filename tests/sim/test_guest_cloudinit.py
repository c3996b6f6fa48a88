"""The parts of the small cloud-init, and of the other stand-ins, that need no node; and that they refuse without one."""

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
from harness import cannot

from cloudddp import payload
from cloudddp.plan import Identity, user_data
from cloudddp.sim import hosts, userdata
from cloudddp.sim.guest import cloudinit, entry, nvidia

GPUS = [{"name": "NVIDIA A10G", "memory_mib": 22888, "seed": 7}] * 2


def ours() -> str:
    texts = [payload.text(f"infra/node/cloudddp-deadline.{kind}") for kind in ("timer", "service")]
    now = datetime(2026, 11, 20, 12, tzinfo=UTC)
    return user_data(Identity("c", "k", "p", "q"), now, now + timedelta(hours=2), (texts[0], texts[1]))


def judged(path: Path) -> subprocess.CompletedProcess[str]:
    if shutil.which("cloud-init") is None:
        cannot("cloud-init is not installed (Debian: apt-get install cloud-init)")
    return subprocess.run(
        ["cloud-init", "schema", "--config-file", str(path)], capture_output=True, text=True, timeout=60
    )


def test_cloud_init_finds_no_fault_with_our_user_data(tmp_path: Path) -> None:
    path = tmp_path / "user-data"
    path.write_text(ours())
    done = judged(path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Valid" in done.stdout


def test_cloud_init_notices_a_fault_in_user_data(tmp_path: Path) -> None:
    """So that the test above can fail."""
    path = tmp_path / "user-data"
    path.write_text(ours().replace('"runcmd": [', '"write_file": 3, "runcmd": ["x", 3, '))
    assert judged(path).returncode != 0


def test_nothing_in_our_own_user_data_is_ignored() -> None:
    assert cloudinit.ignored(userdata.parse(ours().encode()).config) == []


def test_directives_and_users_that_are_not_obeyed_are_named() -> None:
    config = {
        "packages": ["x"],
        "hostname": "y",
        "users": ["default", {"name": "ubuntu"}, {"name": "eve"}],
        "runcmd": [],
    }
    assert cloudinit.ignored(config) == ["hostname", "packages", "users: eve"]


@pytest.mark.parametrize(
    "encoding", [None, "", "text/plain", "b64", "base64", "gz+b64", "gzip+base64", "gz+base64"]
)
def test_every_encoding_of_cloud_init_is_read(encoding: str | None) -> None:
    text = "a\nü\x00"
    data = text.encode()
    if encoding and encoding.startswith("gz"):
        data = gzip.compress(data)
    content = base64.b64encode(data).decode() if encoding and "64" in encoding else text
    entry_ = {"path": "/x", "content": content} | ({} if encoding is None else {"encoding": encoding})
    assert cloudinit.content(entry_) == text.encode()


@pytest.mark.parametrize(
    "entry_",
    [{"encoding": "rot13"}, {"encoding": "b64", "content": "x"}, {"encoding": "gz+b64", "content": "eA=="}],
)
def test_content_that_cannot_be_decoded_is_an_error(entry_: dict[str, str]) -> None:
    with pytest.raises((ValueError, OSError, EOFError)):
        cloudinit.content({"path": "/x", **entry_})


@pytest.mark.parametrize(("given", "mode"), [(None, 0o644), ("0600", 0o600), ("755", 0o755), (0o640, 0o640)])
def test_permissions_are_octal(given: str | int | None, mode: int) -> None:
    assert cloudinit.permissions(given) == mode


def test_commands_are_one_script_in_which_the_shell_lives_on() -> None:
    script = cloudinit.shellify(["cd /usr; x='it'", ["printf", "%s", "a'b c", 3], 'echo "$x $PWD"', None])
    done = subprocess.run(["sh"], input=script, capture_output=True, text=True, timeout=60, cwd="/")
    assert done.stdout == "a'b c3it /usr\n", script


def test_a_command_that_is_neither_string_nor_list_is_an_error() -> None:
    with pytest.raises(TypeError, match="a string or a list"):
        cloudinit.shellify([{"a": "b"}])


def test_what_yaml_has_beyond_json_is_kept() -> None:
    zipped = base64.b64encode(gzip.compress(b"hello")).decode()
    raw = f"#cloud-config\nwrite_files:\n- path: /x\n  encoding: gzip\n  content: !!binary {zipped}\nwhen: 2026-11-20\n1: 2\n"
    config = userdata.parse(raw.encode()).config
    assert cloudinit.content(config["write_files"][0]) == b"hello"
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
def test_nvidia_smi_answers_queries_in_its_own_format(
    arguments: list[str], lines: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert nvidia.answer(GPUS, arguments) == 0
    assert capsys.readouterr().out.splitlines() == lines


def test_nvidia_smi_lists_gpus_with_different_uuids_and_says_that_they_are_simulated(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert nvidia.answer(GPUS, ["-L"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(" (UUID")[0] for line in lines] == [
        f"GPU {n}: NVIDIA A10G (simulated)" for n in (0, 1)
    ]
    assert len(set(lines)) == 2


@pytest.mark.parametrize(
    "arguments", [["--query-gpu=nonsense", "--format=csv"], ["--query-gpu=name", "--format=xml"], ["-r"]]
)
def test_nvidia_smi_refuses_what_it_does_not_know(arguments: list[str]) -> None:
    assert nvidia.answer(GPUS, arguments) != 0


# -- without a node ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def over(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The stand-ins as they lie over a node's /usr, here below a folder of the test's."""
    over = tmp_path_factory.mktemp("over")
    hosts._lay_over(over)
    return over


@pytest.mark.parametrize(
    "command",
    [
        *(
            ["systemctl", *words]
            for words in (["poweroff"], ["daemon-reload"], ["is-system-running"], ["start", "x"])
        ),
        *([name] for name in entry.POWER),
        ["shutdown", "now"],
        ["sudo", "true"],
        ["cloud-init", "status"],
        ["nvidia-smi", "-L"],
    ],
    ids=" ".join,
)
def test_no_stand_in_acts_where_there_is_no_node(over: Path, tmp_path: Path, command: list[str]) -> None:
    """In a pid namespace of its own where that can be had, so that a defect could not end this computer."""
    name, *arguments = command
    sources = over / "lib/cloudddp-lab"
    code = f"import sys; sys.path.insert(0, {str(sources)!r}); sys.argv = {[name, *arguments]!r}; from guest import entry; sys.exit(entry.main())"
    done = _apart([sys.executable, "-I", "-c", code], tmp_path)
    assert done.returncode not in (0, None)
    assert "acts on simulated nodes only; refused" in done.stderr


@pytest.mark.parametrize(
    ("call", "said"),
    [
        ("main(None)", "acts on simulated nodes only; refused"),
        ("power('poweroff', gently=True)", "not the init of a simulated node"),
        ("power('reboot', gently=False)", "not the init of a simulated node"),
    ],
)
def test_the_nodes_init_refuses_where_there_is_no_node(
    over: Path, tmp_path: Path, call: str, said: str
) -> None:
    code = f"import sys; sys.path.insert(0, {str(over / 'lib/cloudddp-lab')!r}); from guest import init; sys.exit(init.{call})"
    done = _apart([sys.executable, "-I", "-c", code], tmp_path)
    assert done.returncode not in (0, None)
    assert said in done.stderr


def test_the_small_cloud_init_writes_nothing_where_there_is_no_node(tmp_path: Path) -> None:
    wanted = tmp_path / "written"
    code = (
        "from cloudddp.sim.guest import cloudinit\n"
        f"config = {{'write_files': [{{'path': {str(wanted)!r}}}], 'bootcmd': ['touch {wanted}']}}\n"
        "try: cloudinit.early(config, [], user=print)\n"
        "finally: cloudinit.late(config, 'touch')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode not in (0, None)
    assert "refused" in done.stderr
    assert not wanted.exists()


def _apart(argv: list[str], cwd: Path) -> subprocess.CompletedProcess[str]:
    alone = (
        ["unshare", "--pid", "--fork", "--kill-child"] if os.getuid() == 0 and shutil.which("unshare") else []
    )
    return subprocess.run([*alone, *argv], capture_output=True, text=True, timeout=60, cwd=cwd)
