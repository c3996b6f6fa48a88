"""A sharded snapshot survives what happens to files: torn writes, flipped bits, killed writers, unfinished folders."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import train_harness as harness

pytest.importorskip("torch")

import torch

from train import sharded
from train.dist import Place, Ranks

pytestmark = pytest.mark.torch

ALONE = Ranks(place=Place(), device=torch.device("cpu"))
PART = "__0_0.distcp"

# Two ranks save ever newer states until they are killed.
WRITER = """
import os, sys
from pathlib import Path
import torch
from train import dist, sharded
from train.config import make
config = make(dataset="synthetic", timeout=60.0)
with dist.join(config, dist.find_place(config, os.environ)) as ranks:
    for step in range(1, 10_000):
        model = {name: torch.full((1_000_000,), float(step)) for name in ("one", "other")}
        sharded.save(Path(sys.argv[1]), {"step": step}, (model, {}), ranks)
"""


def parts(value: float) -> tuple[dict[str, Any], dict[str, Any]]:
    weight = torch.full((1000,), value)
    return {"weight": weight}, {
        "state": {"weight": {"step": weight[0].clone()}},
        "param_groups": [{"lr": value}],
    }


def save(folder: Path, step: int, **facts: Any) -> None:
    sharded.save(folder, {"step": step, **facts}, parts(float(step)), ALONE)


def load(folder: Path) -> tuple[int, float] | None:
    """Step and weights of the newest valid snapshot."""
    facts = sharded.find_newest(folder, ALONE)
    if facts is None:
        return None
    model, optimizer = parts(-1.0)
    sharded.read(facts["path"], (model, optimizer))
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


def test_what_was_saved_is_loaded(tmp_path: Path) -> None:
    facts = {
        "fingerprint": {"model": "small", "seed": 0},
        "best_accuracy": 0.1 + 0.2,
        "scaler": {"scale": 65536.0},
    }
    save(tmp_path, 3, **facts)
    found = sharded.find_newest(tmp_path, ALONE)
    assert found == {"step": 3, **facts, "path": tmp_path / "snapshot-3.dcp"}
    assert load(tmp_path) == (3, 3.0)


def test_an_empty_folder_holds_no_snapshot(tmp_path: Path) -> None:
    assert load(tmp_path) is None
    assert sharded.newest_step(tmp_path) == -1


def test_the_newest_two_are_kept_and_nothing_else(two: Path) -> None:
    assert names(two) == ["snapshot-10.dcp", "snapshot-9.dcp"]
    save(two, 11)
    assert names(two) == ["snapshot-10.dcp", "snapshot-11.dcp"]


def test_a_snapshot_is_on_disk_before_it_gets_its_name_and_then_the_name_is(
    two: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced = []

    def sync(descriptor: int) -> None:
        found = os.fstat(descriptor)
        (path,) = (path for path in (two, *two.rglob("*")) if os.path.samestat(path.stat(), found))
        synced.append((path.name, 0 if path.is_dir() else found.st_size, (two / "snapshot-11.dcp").exists()))

    monkeypatch.setattr(os, "fsync", sync)
    save(two, 11)
    sizes = {path.name: path.stat().st_size for path in (two / "snapshot-11.dcp").iterdir()}
    assert synced[-5:] == [
        (PART, sizes[PART], False),
        (".metadata", sizes[".metadata"], False),
        (sharded.COMPLETE, sizes[sharded.COMPLETE], False),
        (sharded.UNFINISHED, 0, False),
        (two.name, 0, True),
    ]


def test_the_same_step_saved_again_keeps_what_was_there_until_the_new_one_is_whole(two: Path) -> None:
    sharded.save(two, {"step": 10}, parts(0.5), ALONE)
    assert load(two) == (10, 0.5)
    (two / "snapshot-10.dcp" / PART).write_bytes(b"")
    assert load(two) == (10, 10.0)


def damage_last_byte(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))


def damage_middle(path: Path) -> None:
    content = path.read_bytes()
    middle = len(content) // 2
    path.write_bytes(content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :])


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-7])


@pytest.mark.parametrize("harm", [damage_last_byte, damage_middle, truncate, Path.unlink])
@pytest.mark.parametrize("file", [PART, ".metadata", sharded.COMPLETE])
def test_a_damaged_snapshot_is_named_and_the_previous_one_is_used(
    two: Path, file: str, harm: Callable[[Path], None], capsys: pytest.CaptureFixture[str]
) -> None:
    harm(two / "snapshot-10.dcp" / file)
    assert load(two) == (9, 9.0)
    assert f"snapshot {two / 'snapshot-10.dcp'} is skipped: " in capsys.readouterr().err


def test_a_step_in_the_list_that_was_changed_is_noticed(two: Path) -> None:
    path = two / "snapshot-9.dcp" / sharded.COMPLETE
    marker = json.loads(path.read_text())
    marker["facts"]["step"] = 99
    path.write_text(json.dumps(marker))
    assert load(two) == (10, 10.0)


def test_what_was_found_damaged_does_not_crowd_out_good_ones(two: Path) -> None:
    truncate(two / "snapshot-10.dcp" / PART)
    assert load(two) == (9, 9.0)
    save(two, 9)  # as a run does that is stopped in the validation which it resumed in
    save(two, 9)
    assert names(two) == ["snapshot-9.dcp", "snapshot-9.prev.dcp"]


def test_leftovers_of_killed_runs_go_with_the_next_save(two: Path) -> None:
    (two / "snapshot-10.dcp").rename(two / sharded.UNFINISHED)
    (two / sharded.UNFINISHED / "__1_0.distcp").touch()  # of a run with more ranks
    (two / "snapshot-5.dcp").mkdir()  # the removal of an old one was cut short
    save(two, 11)
    assert names(two) == ["snapshot-11.dcp", "snapshot-9.dcp"]
    assert names(two / "snapshot-11.dcp") == [".metadata", PART, sharded.COMPLETE]


def test_removing_leaves_nothing(two: Path) -> None:
    (two / sharded.UNFINISHED).mkdir()
    sharded.remove(two)
    assert names(two) == []


def half_written(draft: Path) -> bool:
    sizes = [path.stat().st_size for path in draft.glob("*.distcp")]
    return bool(sizes) and min(sizes) < 4_000_000


def not_yet_listed(draft: Path) -> bool:
    return (draft / ".metadata").exists() and not (draft / sharded.COMPLETE).exists()


def test_ranks_killed_in_the_middle_of_a_write_leave_a_loadable_snapshot(tmp_path: Path) -> None:
    folder = tmp_path / "out"
    folder.mkdir()
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": harness.free_port(), "WORLD_SIZE": 2}
    shared["PYTHONPATH"] = harness.ROOT
    writers = [
        harness.start(["-c", WRITER, folder], cwd=harness.ROOT, RANK=rank, **shared) for rank in range(2)
    ]
    try:
        stop_at(half_written, folder, writers)
        shutil.copytree(folder, tmp_path / "earlier")  # what would be left if they were killed now
        tell(writers, signal.SIGCONT)
        stop_at(not_yet_listed, folder, writers)
        tell(writers, signal.SIGKILL)
    finally:
        for writer in writers:
            harness.kill_session(writer)
    for left in (tmp_path / "earlier", folder):
        check_left_by_killed_writers(left)


def check_left_by_killed_writers(folder: Path) -> None:
    assert sharded.UNFINISHED in names(folder)
    facts = sharded.find_newest(folder, ALONE)
    assert facts is not None
    model = {name: torch.zeros(1_000_000) for name in ("one", "other")}
    sharded.read(facts["path"], (model, {}))
    assert all(bool((value == facts["step"]).all()) for value in model.values())
    save(folder, facts["step"] + 1)
    assert sharded.UNFINISHED not in names(folder)


def tell(writers: list[subprocess.Popen[str]], number: signal.Signals) -> None:
    for writer in writers:
        os.kill(writer.pid, number)


def stop_at(moment: Callable[[Path], bool], folder: Path, writers: list[subprocess.Popen[str]]) -> None:
    """Stop both writers when a snapshot is finished and `moment` holds of the next one."""
    deadline = time.monotonic() + harness.HANG
    while time.monotonic() < deadline:
        if not holds(moment, folder):
            continue
        tell(writers, signal.SIGSTOP)
        if holds(moment, folder):
            return
        tell(writers, signal.SIGCONT)
    raise AssertionError("the writers were never seen in the middle of a write")


def holds(moment: Callable[[Path], bool], folder: Path) -> bool:
    try:
        return any(folder.glob(sharded.PATTERN)) and moment(folder / sharded.UNFINISHED)
    except FileNotFoundError:
        return False  # a rename came between
