"""Local state of a cluster: written atomically, private, and never needed to stop the bill."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
import threading
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from cloudddp.cluster import replace_nodes
from cloudddp.config.spec import Config
from cloudddp.errors import CloudDDPError
from cloudddp.files import state_home, write_atomic
from cloudddp.job import launch_record
from cloudddp.job.job_request import NewJob, Script
from cloudddp.local_state import ClusterFolder, ClusterRecord

ID = "c-0123456789"
RECORD = ClusterRecord(ID, "demo", "us-east-1", "", "2026-11-20T14:00:00Z")


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def create(root: Path) -> ClusterFolder:
    folder = ClusterFolder(ID, root=root)
    folder.create(RECORD, private_key="PRIVATE\n", host_public="ssh-ed25519 AAAA")
    return folder


def test_state_folder_is_cloudddp_home_or_that_of_the_platform(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for given in (str(tmp_path / "here"), "here"):
        monkeypatch.setenv("CLOUDDDP_HOME", given)
        assert state_home() == tmp_path / "here"
    assert ClusterFolder(ID).path.is_relative_to(tmp_path / "here")
    monkeypatch.setenv("CLOUDDDP_HOME", "")
    assert (state_home().is_absolute(), state_home().name) == (True, "cloudddp")


def test_created_record_is_read_back_and_private(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        folder = create(tmp_path)
    finally:
        os.umask(before)
    assert (mode(folder.private_key), mode(folder.path)) == (0o600, 0o700)
    again = ClusterFolder(ID, root=tmp_path)
    assert again.record() == RECORD
    assert again.login_key().read_text() == "PRIVATE\n"
    assert again.host_key.read_text() == "ssh-ed25519 AAAA\n"


def test_launch_with_the_id_of_another_job_is_refused(tmp_path: Path) -> None:
    folder = create(tmp_path)

    def keep(script: str) -> None:
        job = NewJob(Script(script), id="20261120-140000-abcd")
        nothing: dict[str, tuple[()]] = {"files": (), "variables": (), "env_files": (), "nodes": ()}
        launch_record.keep(folder, launch_record.of_launch(job, Config(), root=tmp_path, **nothing))

    keep("first.py")
    with pytest.raises(CloudDDPError, match="has the id 20261120-140000-abcd; nothing was started"):
        keep("second.py")
    assert launch_record.find(folder, None).target == "first.py"


def test_missing_key_error_has_a_hint(tmp_path: Path) -> None:
    folder = ClusterFolder("c-9999999999", root=tmp_path)
    assert folder.record() is None
    with pytest.raises(CloudDDPError, match="c-9999999999") as caught:
        folder.login_key()
    assert "cloudddp down" in caught.value.hint
    for lost in ("id_ed25519", "host_key.pub"):  # it needs both
        folder = create(tmp_path / lost)
        (folder.path / lost).unlink()
        with pytest.raises(CloudDDPError):
            folder.login_key()


def damaged(**fields: Any) -> str:
    return json.dumps({**asdict(RECORD), **fields})


@pytest.mark.parametrize(
    "text",
    [
        *("", "{", "[]", '{"id": "c-1"}', '{"unknown": 1}', "[" * 9999),
        damaged(id="c-9999999999"),  # of another folder
        damaged(name="../x"),
        damaged(region="mars north"),
        *(damaged(nodes=value) for value in ("two", -1, 10**400)),
        *(damaged(node_hour=value) for value in (-1.0, 1e308)),
        *(damaged(usd=value) for value in (-1.0, 1e308)),
        damaged(usd=7).replace('"usd": 7', '"usd": 1e999'),
    ],
)
def test_damaged_record_counts_as_none(tmp_path: Path, text: str) -> None:
    folder = create(tmp_path)
    (folder.path / "cluster.json").write_text(text)
    assert folder.record() is None
    (folder.path / "cluster.json").unlink()
    os.mkfifo(folder.path / "cluster.json")
    assert folder.record() is None


@pytest.mark.parametrize("data", [b"\xff", b"[", b"[]", b'{"ImageId": 1}', None])
def test_damaged_record_of_a_launch_replaces_no_node(tmp_path: Path, data: bytes | None) -> None:
    folder = create(tmp_path)
    if data is not None:
        folder.launch.write_bytes(data)
    with pytest.raises(CloudDDPError, match="no record of how the nodes"):
        replace_nodes._recorded_launch(folder)


def test_fields_of_a_record_are_updated_where_there_is_one(tmp_path: Path) -> None:
    folder, other = create(tmp_path), ClusterFolder("c-9999999999", root=tmp_path)
    folder.update(extended="moving")
    folder.update(usd=1.5)
    other.update(usd=1.5)
    assert (folder.record(), other.record()) == (replace(RECORD, extended="moving", usd=1.5), None)


def test_record_of_another_version_is_read(tmp_path: Path) -> None:
    """An earlier version also wrote the login user and the time of creation."""
    folder = create(tmp_path)
    older = {**json.loads((folder.path / "cluster.json").read_text()), "user": "ubuntu", "made": "x"}
    (folder.path / "cluster.json").write_text(json.dumps(older))
    assert folder.record() == RECORD


def test_journal_keeps_the_order_across_threads(tmp_path: Path) -> None:
    folder = ClusterFolder(ID, root=tmp_path)
    folder.journal("first", step="key-pair")
    threads = [
        threading.Thread(target=lambda k=k: [folder.journal("many", k=k, n=n) for n in range(20)])  # type: ignore[misc]
        for k in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    folder.journal("last", text='new\nline and "quotes"')
    lines = [json.loads(line) for line in (folder.path / "journal.jsonl").read_text().splitlines()]
    assert len(lines) == 82
    assert (lines[0]["event"], lines[0]["step"]) == ("first", "key-pair")
    assert lines[-1]["text"] == 'new\nline and "quotes"'
    for k in range(4):
        assert [line["n"] for line in lines if line.get("k") == k] == list(range(20))
    assert all(line["time"].endswith("+00:00") for line in lines)


def test_forget_removes_keys_and_keeps_history(tmp_path: Path) -> None:
    folder = create(tmp_path)
    for path in (folder.known_hosts, folder.host_keys, folder.ssh_config):
        path.write_text("x")
    folder.journal("terminated")
    folder.forget()
    folder.forget()
    assert sorted(path.name for path in folder.path.iterdir()) == ["cluster.json", "journal.jsonl"]
    assert folder.record() == RECORD


def test_write_atomic_leaves_no_temporary_file(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "file"
    write_atomic(path, "old")
    write_atomic(path, b"\xffnew")
    assert (path.read_bytes(), mode(path)) == (b"\xffnew", 0o600)
    assert [entry.name for entry in path.parent.iterdir()] == ["file"]
    with pytest.raises(IsADirectoryError):
        write_atomic(path.parent, "new")  # a file cannot replace a folder
    assert [entry.name for entry in tmp_path.iterdir()] == ["deep"]
    assert path.read_bytes() == b"\xffnew"


def test_reader_never_sees_a_partial_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    texts = ["a" * 200_000, "b" * 200_000]
    write_atomic(path, texts[0])
    code = (
        "import sys; from pathlib import Path; from cloudddp import files\n"
        "for n in range(60): files.write_atomic(Path(sys.argv[1]), 'ab'[n % 2] * 200_000)"
    )
    with subprocess.Popen([sys.executable, "-c", code, str(path)]) as writer:
        reads = 0
        while writer.poll() is None or reads == 0:
            assert path.read_text() in texts
            reads += 1
    assert writer.returncode == 0
