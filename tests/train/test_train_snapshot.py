"""Snapshots survive truncated writes, flipped bits, a killed writer and a full disk."""

from __future__ import annotations

import math
import os
import signal
import stat
import threading
import zipfile
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

pytest.importorskip("torch")

import torch
from support.training import launch
from support.training.damage import MakesFolder
from support.training.output import stop_during_snapshot

from train.checkpoint import full

pytestmark = pytest.mark.torch
WRITER = launch.CHECKS / "write_snapshots.py"


def state(step: int) -> full.State:
    return {
        "step": step,
        "payload": torch.full((1000,), float(step)),
        "nested": {"lr": 0.5, "names": ["a", "b"]},
    }


def loaded_step(folder: Path) -> int:
    loaded = full.load_local(folder)
    assert loaded is not None
    return loaded["step"]


@pytest.fixture
def two(tmp_path: Path) -> Path:
    """A folder with snapshots of steps 1 (the previous one) and 2 (the newest)."""
    full.save(tmp_path, state(1))
    full.save(tmp_path, state(2))
    return tmp_path


class HeldUp:
    """Is written only once the other file is complete, like a snapshot that is written in the background for
    long."""

    def __init__(self, started: threading.Event, done: threading.Event) -> None:
        self.started, self.done = started, done

    def __reduce__(self) -> tuple[type, tuple[()]]:
        self.started.set()
        assert self.done.wait(60)
        return OrderedDict, ()


def test_best_weights_may_be_written_while_a_snapshot_is(tmp_path: Path) -> None:
    started, done = threading.Event(), threading.Event()
    with ThreadPoolExecutor() as pool:
        snapshot = pool.submit(full.save, tmp_path, {**state(1), "last": HeldUp(started, done)})
        assert started.wait(60)
        full.write(tmp_path / "best.pt", state(2))
        done.set()
        snapshot.result()
    for name, step in (("best.pt", 2), (full.NAME, 1)):
        loaded = full.read(tmp_path / name)
        assert loaded is not None
        assert (loaded["step"], loaded["payload"][0].item()) == (step, step)


def test_snapshot_is_synced_before_it_is_renamed_and_the_folder_after(
    two: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced = []  # what, its size, and the step of the newest snapshot at that time

    def sync(descriptor: int) -> None:
        info = os.fstat(descriptor)
        is_folder = stat.S_ISDIR(info.st_mode)
        synced.append((is_folder, 0 if is_folder else info.st_size, loaded_step(two)))

    monkeypatch.setattr(os, "fsync", sync)
    full.save(two, state(3))
    assert synced == [(False, (two / full.NAME).stat().st_size, 2), (True, 0, 3)]


def test_only_two_snapshots_are_kept_and_the_newest_is_loaded(two: Path) -> None:
    assert full.load_local(two.with_name("missing")) is None
    loaded = full.load_local(two)
    assert loaded is not None
    assert torch.equal(loaded["payload"], state(2)["payload"])
    assert (loaded["step"], loaded["nested"]) == (2, state(2)["nested"])
    assert sorted(path.name for path in two.iterdir()) == [full.PREVIOUS, full.NAME]


@pytest.mark.parametrize("share", [0.0, 0.9])
def test_truncated_snapshot_is_reported_and_the_previous_one_is_used(
    two: Path, share: float, capsys: pytest.CaptureFixture[str]
) -> None:
    path = two / full.NAME
    whole = path.read_bytes()
    path.write_bytes(whole[: int(len(whole) * share)])
    assert loaded_step(two) == 1
    assert str(path) in capsys.readouterr().err


def test_flipped_bits_in_the_weights_are_detected(two: Path) -> None:
    path = two / full.NAME
    payload = state(2)["payload"].numpy().tobytes()
    whole = path.read_bytes()
    assert whole.count(payload) == 1
    path.write_bytes(whole.replace(payload, payload[:40] + bytes([payload[40] ^ 1]) + payload[41:]))
    assert loaded_step(two) == 1


def test_snapshot_of_an_older_format_is_reported_and_skipped(
    two: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.save({**state(99), "format": 1}, two / full.NAME)
    assert loaded_step(two) == 1
    assert f"format 1, but this trainer reads format {full.FORMAT}" in capsys.readouterr().err


def test_last_written_snapshot_is_loaded_even_if_its_step_is_lower(two: Path) -> None:
    full.save(two, state(1))
    assert loaded_step(two) == 1


def test_only_temporary_files_of_killed_writers_are_removed(two: Path) -> None:
    for writer in (0, 3):
        full.temporary_file(two / full.NAME, writer).write_bytes(b"half")
    full.remove_temporary_files(two)
    assert sorted(path.name for path in two.iterdir()) == [full.PREVIOUS, full.NAME]


@pytest.mark.parametrize("step", [math.nan, -1, 10**30, True, "3"])
def test_snapshot_with_an_impossible_step_is_reported_and_the_previous_one_is_used(
    two: Path, step: object, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.save({**state(2), "step": step, "format": full.FORMAT}, two / full.NAME)
    assert full.newest_step(two) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line == f"skipping snapshot {two / full.NAME}: ValueError: its step is {step}"


def test_snapshot_with_code_in_its_pickle_is_skipped_and_not_executed(
    two: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "executed"
    torch.save({**state(99), "format": full.FORMAT, "more": MakesFolder(folder)}, two / full.NAME)
    assert loaded_step(two) == 1
    assert not folder.exists()
    assert f"skipping snapshot {two / full.NAME}" in capsys.readouterr().err


def test_snapshot_from_a_missing_gpu_is_loaded(two: Path) -> None:
    path = two / full.NAME
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    (index,) = (name for name in members if name.endswith("/data.pkl"))
    cpu, gpu = (b"X" + len(name).to_bytes(4, "little") + name for name in (b"cpu", b"cuda:7"))
    assert cpu in members[index]
    members[index] = members[index].replace(cpu, gpu)
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    loaded = full.load_local(two)
    assert loaded is not None
    assert loaded["step"] == 2
    assert torch.equal(loaded["payload"], state(2)["payload"])


def test_writer_killed_during_a_write_leaves_a_valid_snapshot(tmp_path: Path) -> None:
    writer = launch.start(WRITER, tmp_path, 0, 4_000_000)
    stop_during_snapshot(tmp_path / full.NAME, writer.pid)
    writer.kill_session()
    assert writer.wait() == -signal.SIGKILL
    loaded = full.load_local(tmp_path)
    assert loaded is not None
    assert bool((loaded["payload"] == loaded["step"]).all())


def test_full_disk_is_a_clear_error_and_keeps_the_old_snapshots(two: Path, tmp_path: Path) -> None:
    before = {path.name: path.read_bytes() for path in two.iterdir()}
    run = launch.run(WRITER, two, 100_000, 1_000_000)
    assert run.code == 1
    assert f"cannot write {two / full.NAME} ([Errno 27] File too large); the one before" in run.stderr
    assert "Traceback" not in run.stderr
    assert {path.name: path.read_bytes() for path in two.iterdir()} == before
    empty = tmp_path / "empty"
    empty.mkdir()
    run = launch.run(WRITER, empty, 100_000, 1_000_000)
    assert run.stderr.startswith(f"cannot write {empty / full.NAME} ([Errno 27] File too large)\n")
