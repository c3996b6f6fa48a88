"""A snapshot survives what happens to files: torn writes, flipped bits, a killed writer, a full disk."""

from __future__ import annotations

import os
import signal
import stat
import time
import zipfile
from pathlib import Path

import pytest
import train_harness as harness

pytest.importorskip("torch")

import torch

from train import snapshot

pytestmark = pytest.mark.torch

# Saves ever newer states until it is killed, or until the disk is full.
WRITER = """
import resource, sys
from pathlib import Path
import torch
from train import snapshot
from train.errors import TrainError
folder, limit = Path(sys.argv[1]), int(sys.argv[2])
if limit:
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
for step in range(1, 10_000):
    try:
        snapshot.save(folder, {"step": step, "payload": torch.full((int(sys.argv[3]),), float(step))})
    except TrainError as error:
        sys.exit(str(error))
"""


def state(step: int) -> snapshot.State:
    return {
        "step": step,
        "payload": torch.full((1000,), float(step)),
        "nested": {"lr": 0.5, "names": ["a", "b"]},
    }


@pytest.fixture
def two(tmp_path: Path) -> Path:
    """A folder with snapshots of steps 1 (previous) and 2 (newest)."""
    snapshot.save(tmp_path, state(1))
    snapshot.save(tmp_path, state(2))
    return tmp_path


def test_what_was_saved_is_loaded(two: Path) -> None:
    loaded = snapshot.load_local(two)
    assert loaded is not None
    assert loaded["step"] == 2
    assert torch.equal(loaded["payload"], state(2)["payload"])
    assert loaded["nested"] == state(2)["nested"]


def test_a_snapshot_is_on_disk_before_it_gets_its_name_and_then_the_name_is(
    two: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced = []

    def sync(descriptor: int) -> None:
        found = os.fstat(descriptor)
        loaded = snapshot.load_local(two)
        assert loaded is not None
        synced.append(
            ("folder", 0, loaded["step"])
            if stat.S_ISDIR(found.st_mode)
            else ("file", found.st_size, loaded["step"])
        )

    monkeypatch.setattr(os, "fsync", sync)
    snapshot.save(two, state(3))
    assert synced == [("file", (two / snapshot.NAME).stat().st_size, 2), ("folder", 0, 3)]


def test_nothing_but_the_two_snapshots_is_left_after_saving(two: Path) -> None:
    assert sorted(path.name for path in two.iterdir()) == [snapshot.PREVIOUS, snapshot.NAME]


def test_an_empty_folder_holds_no_snapshot(tmp_path: Path) -> None:
    assert snapshot.load_local(tmp_path) is None


@pytest.mark.parametrize("share", [0.0, 0.3, 0.9, 0.999])
def test_a_truncated_snapshot_is_named_and_the_previous_one_is_used(
    two: Path, share: float, capsys: pytest.CaptureFixture[str]
) -> None:
    path = two / snapshot.NAME
    whole = path.read_bytes()
    path.write_bytes(whole[: int(len(whole) * share)])
    loaded = snapshot.load_local(two)
    assert loaded is not None
    assert loaded["step"] == 1
    assert str(path) in capsys.readouterr().err


def test_flipped_bits_in_the_weights_are_noticed(two: Path) -> None:
    path = two / snapshot.NAME
    payload = state(2)["payload"].numpy().tobytes()
    whole = path.read_bytes()
    assert whole.count(payload) == 1
    path.write_bytes(whole.replace(payload, payload[:40] + bytes([payload[40] ^ 1]) + payload[41:]))
    loaded = snapshot.load_local(two)
    assert loaded is not None
    assert loaded["step"] == 1


def test_a_snapshot_of_an_older_format_is_skipped_with_a_word(
    two: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.save({**state(99), "format": 1}, two / snapshot.NAME)
    loaded = snapshot.load_local(two)
    assert loaded is not None
    assert loaded["step"] == 1
    assert f"its format is 1, and this trainer reads {snapshot.FORMAT}" in capsys.readouterr().err


def test_what_was_written_last_counts_although_its_step_is_lower(two: Path) -> None:
    snapshot.save(two, state(1))
    loaded = snapshot.load_local(two)
    assert loaded is not None
    assert loaded["step"] == 1


def test_what_killed_writers_left_is_swept_and_nothing_else(two: Path) -> None:
    for writer in (0, 3):
        (two / snapshot.TEMPORARY.format(writer)).write_bytes(b"half")
    snapshot.sweep(two)
    assert sorted(path.name for path in two.iterdir()) == [snapshot.PREVIOUS, snapshot.NAME]


def test_a_file_that_is_something_else_is_skipped(two: Path) -> None:
    torch.save({"step": 99, "weights": torch.zeros(3)}, two / snapshot.NAME)
    loaded = snapshot.load_local(two)
    assert loaded is not None
    assert loaded["step"] == 1


class Order:
    """Unpickled, it makes a folder: it stands for whatever a stranger's file may do."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (str(self.folder),)


def test_a_snapshot_with_orders_in_it_is_skipped_and_they_are_not_carried_out(
    two: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    done = tmp_path / "done"
    torch.save({**state(99), "format": snapshot.FORMAT, "more": Order(done)}, two / snapshot.NAME)
    loaded = snapshot.load_local(two)
    assert loaded is not None
    assert loaded["step"] == 1
    assert not done.exists()
    assert f"snapshot {two / snapshot.NAME} is skipped" in capsys.readouterr().err


def test_a_snapshot_whose_tensors_lay_on_a_gpu_that_is_not_here_is_loaded(two: Path) -> None:
    path = two / snapshot.NAME
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    (index,) = (name for name in members if name.endswith("/data.pkl"))
    here, there = (b"X" + len(name).to_bytes(4, "little") + name for name in (b"cpu", b"cuda:7"))
    assert here in members[index]
    members[index] = members[index].replace(here, there)
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    loaded = snapshot.load_local(two)
    assert loaded is not None
    assert loaded["step"] == 2
    assert torch.equal(loaded["payload"], state(2)["payload"])


def test_a_crash_between_the_two_renames_leaves_the_previous_snapshot(two: Path) -> None:
    (two / snapshot.NAME).replace(two / snapshot.PREVIOUS)
    loaded = snapshot.load_local(two)
    assert loaded is not None
    assert loaded["step"] == 2


@pytest.mark.parametrize("attempt", range(3))
def test_a_writer_killed_in_the_middle_of_a_write_leaves_a_loadable_snapshot(
    tmp_path: Path, attempt: int
) -> None:
    process = harness.start(["-c", WRITER, tmp_path, 0, 4_000_000], cwd=harness.ROOT, PYTHONPATH=harness.ROOT)
    try:
        stop_in_the_middle_of_a_write(tmp_path, process.pid)
    finally:
        harness.kill_session(process)
    assert process.returncode == -signal.SIGKILL
    loaded = snapshot.load_local(tmp_path)
    assert loaded is not None
    assert bool((loaded["payload"] == loaded["step"]).all())


def stop_in_the_middle_of_a_write(folder: Path, writer: int) -> None:
    """Stop the writer while its new snapshot is shorter than the newest one."""
    newest = folder / snapshot.NAME
    deadline = time.monotonic() + harness.HANG
    while time.monotonic() < deadline:
        if not half_written(folder, newest):
            continue
        os.kill(writer, signal.SIGSTOP)
        time.sleep(0.001)  # until the signal is there
        if half_written(folder, newest):
            return
        os.kill(writer, signal.SIGCONT)
    raise AssertionError("the writer was never seen in the middle of a write")


def half_written(folder: Path, newest: Path) -> bool:
    try:
        whole = newest.stat().st_size
        return any(0 < path.stat().st_size < whole for path in folder.glob(snapshot.TEMPORARY.format("*")))
    except FileNotFoundError:
        return False  # nothing is saved yet, or a rename came between


def test_a_full_disk_is_a_clear_error_and_the_old_snapshots_stay(two: Path) -> None:
    before = {path.name: path.read_bytes() for path in two.iterdir()}
    done = harness.python("-c", WRITER, two, 100_000, 1_000_000, PYTHONPATH=harness.ROOT)
    assert done.returncode == 1
    assert "cannot be written" in done.stderr
    assert "Traceback" not in done.stderr
    assert {path.name: path.read_bytes() for path in two.iterdir()} == before
