"""The files that a laptop keeps of a cluster: whole or not there, private, and never needed to stop the bill."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from cloudddp import state
from cloudddp.errors import CloudDDPError
from cloudddp.state import ClusterFolder, ClusterRecord

ID = "c-0123456789"
RECORD = ClusterRecord(ID, "demo", "us-east-1", "", "ubuntu", "2026-11-20T12:00:00Z", "2026-11-20T14:00:00Z")


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def made(root: Path) -> ClusterFolder:
    folder = ClusterFolder(ID, root=root)
    folder.create(RECORD, private_key="PRIVATE\n", host_public="ssh-ed25519 AAAA")
    return folder


def test_the_state_folder_is_where_the_user_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CLOUDDDP_HOME", str(tmp_path / "here"))
    assert state.home() == tmp_path / "here"
    assert ClusterFolder(ID).path.is_relative_to(tmp_path / "here")


def test_a_relative_state_folder_is_under_the_working_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CLOUDDDP_HOME", "here")
    assert state.home() == tmp_path / "here"


def test_without_a_word_from_the_user_it_is_the_platforms_state_folder(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CLOUDDDP_HOME", "")
    assert state.home().is_absolute()
    assert state.home().name == "cloudddp"


def test_what_was_created_is_found_again(tmp_path: Path) -> None:
    made(tmp_path)
    again = ClusterFolder(ID, root=tmp_path)
    assert again.record() == RECORD
    assert again.login_key().read_text() == "PRIVATE\n"
    assert again.host_key.read_text() == "ssh-ed25519 AAAA\n"


def test_the_private_key_is_readable_by_its_owner_alone(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        folder = made(tmp_path)
    finally:
        os.umask(before)
    assert mode(folder.private_key) == 0o600
    assert mode(folder.path) == 0o700


def test_a_cluster_of_another_laptop_has_no_record_and_its_key_error_says_what_to_do(tmp_path: Path) -> None:
    folder = ClusterFolder("c-9999999999", root=tmp_path)
    assert folder.record() is None
    with pytest.raises(CloudDDPError, match="c-9999999999") as caught:
        folder.login_key()
    assert "cloudddp down" in caught.value.hint


@pytest.mark.parametrize("text", ["", "{", "[]", '{"id": "c-1"}', '{"unknown": 1}'])
def test_a_damaged_record_counts_as_none(tmp_path: Path, text: str) -> None:
    folder = made(tmp_path)
    (folder.path / "cluster.json").write_text(text)
    assert folder.record() is None


@pytest.mark.parametrize("lost", ["id_ed25519", "host_key.pub"])
def test_half_of_the_keys_is_no_key(tmp_path: Path, lost: str) -> None:
    folder = made(tmp_path)
    (folder.path / lost).unlink()
    with pytest.raises(CloudDDPError):
        folder.login_key()


def test_the_journal_keeps_every_note_in_order_also_from_several_threads(tmp_path: Path) -> None:
    folder = ClusterFolder(ID, root=tmp_path)
    folder.note("first", step="key-pair")
    threads = [
        threading.Thread(target=lambda k=k: [folder.note("many", k=k, n=n) for n in range(20)])  # type: ignore[misc]
        for k in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    folder.note("last", text='new\nline and "quotes"')
    lines = [json.loads(line) for line in (folder.path / "journal.jsonl").read_text().splitlines()]
    assert len(lines) == 82
    assert (lines[0]["event"], lines[0]["step"]) == ("first", "key-pair")
    assert lines[-1]["text"] == 'new\nline and "quotes"'
    for k in range(4):
        assert [line["n"] for line in lines if line.get("k") == k] == list(range(20))
    assert all(line["time"].endswith("+00:00") for line in lines)


def test_forgetting_removes_the_keys_and_keeps_the_history(tmp_path: Path) -> None:
    folder = made(tmp_path)
    folder.known_hosts.write_text("x")
    folder.host_keys.write_text("x")
    folder.note("terminated")
    folder.forget()
    folder.forget()
    assert sorted(path.name for path in folder.path.iterdir()) == ["cluster.json", "journal.jsonl"]
    assert folder.record() == RECORD


def test_a_file_is_replaced_whole_and_nothing_is_left_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "file"
    state.write_atomic(path, "old")
    state.write_atomic(path, b"\xffnew")
    assert path.read_bytes() == b"\xffnew"
    assert mode(path) == 0o600
    assert [entry.name for entry in path.parent.iterdir()] == ["file"]


def test_a_write_that_fails_leaves_the_old_one_and_nothing_else(tmp_path: Path) -> None:
    target = tmp_path / "file"
    target.mkdir()  # a folder cannot be replaced by a file
    with pytest.raises(IsADirectoryError):
        state.write_atomic(target, "new")
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]


def test_a_reader_never_sees_half_a_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    texts = ["a" * 200_000, "b" * 200_000]
    state.write_atomic(path, texts[0])
    code = (
        "import sys; from pathlib import Path; from cloudddp import state\n"
        "for n in range(60): state.write_atomic(Path(sys.argv[1]), 'ab'[n % 2] * 200_000)"
    )
    with subprocess.Popen([sys.executable, "-c", code, str(path)]) as writer:
        reads = 0
        while writer.poll() is None or reads == 0:
            assert path.read_text() in texts
            reads += 1
    assert writer.returncode == 0
