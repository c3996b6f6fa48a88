"""Sharded snapshots survive truncated writes, flipped bits, killed writers and unfinished folders."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from support.training import launch
from support.training.damage import flip_a_bit
from support.training.small_trainer import single_process

from train.checkpoint import sharded

pytestmark = pytest.mark.torch
SINGLE = single_process()
PART = "__0_0.distcp"
WRITER = launch.CHECKS / "write_sharded_snapshots.py"


def parts(value: float) -> sharded.ShardedState:
    weight = torch.full((1000,), value)
    optimizer = {"state": {"weight": {"step": weight[0].clone()}}, "param_groups": [{"lr": value}]}
    return {"weight": weight}, optimizer, {}


def save(folder: Path, step: int, **facts: Any) -> None:
    sharded.save(folder, {"step": step, **facts}, parts(float(step)), SINGLE)


def load(folder: Path) -> tuple[int, float] | None:
    """Return step and weights of the newest valid snapshot."""
    facts = sharded.find_newest(folder, SINGLE)
    if facts is None:
        return None
    model, optimizer, _ = parts(-1.0)
    sharded.read(facts["path"], (model, optimizer, {"not.saved": torch.zeros(1)}))
    assert optimizer["param_groups"][0]["lr"] == model["weight"][0] == optimizer["state"]["weight"]["step"]
    return facts["step"], model["weight"].unique().item()


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture
def two(tmp_path: Path) -> Path:
    """A folder with snapshots of steps 9 and 10."""
    save(tmp_path, 9)
    save(tmp_path, 10)
    return tmp_path


def test_saved_state_is_loaded(tmp_path: Path) -> None:
    facts = {
        "settings": {"model": "small", "seed": 0},
        "hooks": {"BestWeights": {"entries": [[0.1 + 0.2, 3, 1]]}},
        "scaler": {"scale": 65536.0},
    }
    save(tmp_path, 3, **facts)
    found = sharded.find_newest(tmp_path, SINGLE)
    assert found == {"step": 3, **facts, "path": tmp_path / "snapshot-3.dcp"}
    assert load(tmp_path) == (3, 3.0)


def test_only_two_snapshots_are_kept(two: Path) -> None:
    assert names(two) == ["snapshot-10.dcp", "snapshot-9.dcp"]
    save(two, 11)
    assert names(two) == ["snapshot-10.dcp", "snapshot-11.dcp"]


def test_snapshot_is_synced_before_it_is_renamed_and_the_folder_after(
    two: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced = []  # name, size, and whether the snapshot has its final name at that time

    def sync(descriptor: int) -> None:
        info = os.fstat(descriptor)
        (path,) = (path for path in (two, *two.rglob("*")) if os.path.samestat(path.stat(), info))
        synced.append((path.name, 0 if path.is_dir() else info.st_size, (two / "snapshot-11.dcp").exists()))

    monkeypatch.setattr(os, "fsync", sync)
    save(two, 11)
    sizes = {path.name: path.stat().st_size for path in (two / "snapshot-11.dcp").iterdir()}
    assert synced[-5:] == [
        (PART, sizes[PART], False),
        (".metadata", sizes[".metadata"], False),
        (sharded.MANIFEST, sizes[sharded.MANIFEST], False),
        (sharded.UNFINISHED, 0, False),
        (two.name, 0, True),
    ]


def test_saving_a_step_again_keeps_the_first_as_a_fallback(two: Path) -> None:
    sharded.save(two, {"step": 10}, parts(0.5), SINGLE)
    assert load(two) == (10, 0.5)
    (two / "snapshot-10.dcp" / PART).write_bytes(b"")
    assert load(two) == (10, 10.0)


def damage_last_byte(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-7])


@pytest.mark.parametrize(
    ("file", "damage"),
    [
        *((PART, damage) for damage in (flip_a_bit, damage_last_byte, truncate, Path.unlink)),
        *((".metadata", damage) for damage in (flip_a_bit, Path.unlink)),
        *((sharded.MANIFEST, damage) for damage in (truncate, Path.unlink)),
    ],
)
def test_damaged_snapshot_is_reported_and_the_previous_one_is_used(
    two: Path, file: str, damage: Callable[[Path], None], capsys: pytest.CaptureFixture[str]
) -> None:
    damage(two / "snapshot-10.dcp" / file)
    assert load(two) == (9, 9.0)
    assert f"skipping snapshot {two / 'snapshot-10.dcp'}: " in capsys.readouterr().err


def test_changed_step_in_the_manifest_is_detected(two: Path) -> None:
    path = two / "snapshot-9.dcp" / sharded.MANIFEST
    manifest = json.loads(path.read_text())
    manifest["facts"]["step"] = 99
    path.write_text(json.dumps(manifest))
    assert load(two) == (10, 10.0)


def test_damaged_snapshot_does_not_displace_valid_ones(two: Path) -> None:
    truncate(two / "snapshot-10.dcp" / PART)
    assert load(two) == (9, 9.0)
    save(two, 9)  # as does a run that is stopped in the validation in which it resumed
    save(two, 9)
    assert names(two) == ["snapshot-9.dcp", "snapshot-9.prev.dcp"]


def test_next_save_removes_what_killed_runs_have_left(two: Path) -> None:
    (two / "snapshot-10.dcp").rename(two / sharded.UNFINISHED)
    (two / sharded.UNFINISHED / "__1_0.distcp").touch()  # of a run with more ranks
    (two / "snapshot-5.dcp").mkdir()  # the removal of an old one was interrupted
    save(two, 11)
    assert names(two) == ["snapshot-11.dcp", "snapshot-9.dcp"]
    assert names(two / "snapshot-11.dcp") == [".metadata", PART, sharded.MANIFEST]


def test_remove_leaves_nothing(two: Path) -> None:
    (two / sharded.UNFINISHED).mkdir()
    sharded.remove(two)
    assert (names(two), load(two), sharded.newest_step(two)) == ([], None, -1)


def save_twice(folder: Path) -> None:
    save(folder, 11)
    save(folder, 12)


@pytest.mark.parametrize("remove", [sharded.remove, save_twice])
def test_link_to_a_snapshot_elsewhere_is_removed_and_its_target_stays(
    tmp_path: Path, remove: Callable[[Path], None]
) -> None:
    elsewhere, folder = tmp_path / "elsewhere", tmp_path / "out"
    elsewhere.mkdir()
    folder.mkdir()
    save(elsewhere, 3)
    link = folder / "snapshot-3.dcp"
    link.symlink_to(elsewhere / link.name)
    remove(folder)
    assert load(elsewhere) == (3, 3.0)
    assert link.name not in names(folder)


def is_half_written(draft: Path) -> bool:
    sizes = [path.stat().st_size for path in draft.glob("*.distcp")]
    return bool(sizes) and min(sizes) < 4_000_000


def is_not_listed(draft: Path) -> bool:
    return (draft / ".metadata").exists() and not (draft / sharded.MANIFEST).exists()


def test_ranks_killed_during_a_write_leave_a_valid_snapshot(tmp_path: Path) -> None:
    folder = tmp_path / "out"
    folder.mkdir()
    writers = launch.start_ranks(2, WRITER, folder)
    stop_at(is_half_written, folder, writers)
    shutil.copytree(folder, tmp_path / "earlier")  # what a kill at this moment would leave
    signal_all(writers, signal.SIGCONT)
    stop_at(is_not_listed, folder, writers)
    signal_all(writers, signal.SIGKILL)
    launch.wait(*writers)
    for left in (tmp_path / "earlier", folder):
        check_left_by_killed_writers(left)


def check_left_by_killed_writers(folder: Path) -> None:
    assert sharded.UNFINISHED in names(folder)
    facts = sharded.find_newest(folder, SINGLE)
    assert facts is not None
    model = {name: torch.zeros(1_000_000) for name in ("one", "other")}
    sharded.read(facts["path"], (model, {}, {}))
    assert all(bool((value == facts["step"]).all()) for value in model.values())
    save(folder, facts["step"] + 1)
    assert sharded.UNFINISHED not in names(folder)


def signal_all(writers: list[launch.Run], number: signal.Signals) -> None:
    for writer in writers:
        os.kill(writer.pid, number)


def stop_at(condition: Callable[[Path], bool], folder: Path, writers: list[launch.Run]) -> None:
    """Stop both writers when a snapshot is finished and the next one meets the condition."""
    deadline = time.monotonic() + launch.HANG
    while time.monotonic() < deadline:
        if not is_met(condition, folder):
            continue
        signal_all(writers, signal.SIGSTOP)
        if is_met(condition, folder):
            return
        signal_all(writers, signal.SIGCONT)
    raise AssertionError("the writers were never seen during a write")


def is_met(condition: Callable[[Path], bool], folder: Path) -> bool:
    try:
        finished = any(folder.glob(sharded.PATTERN))
        return finished and condition(folder / sharded.UNFINISHED)
    except FileNotFoundError:
        return False  # a rename came between
