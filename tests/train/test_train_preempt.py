"""Runs that are ended from outside: SIGTERM to all ranks or one, at any time; a dead peer; a full disk;
Ctrl-C.

Each must give one sentence from our ranks, an exit code and a status, without a traceback or a hang.
"""

from __future__ import annotations

import os
import re
import resource
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from support.training import launch
from support.training.output import (
    CLOCK_FIELDS,
    differing_paths,
    read_metrics,
    read_snapshot,
    read_status,
    wait_for_step,
)

from train.checkpoint import full

pytestmark = [pytest.mark.torch, pytest.mark.xdist_group("train_preempt")]
linux_only = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc, and limits another process")
MID_EPOCH = 6
LOST = "lost connection to the other ranks ("
WAITING = launch.CHECKS / "wait_in_validation.py"


def flags(*more: object, samples: int = 640, batch: int = 8, model: str = "mnist") -> list[object]:
    """Return the flags of a run of 80 steps per epoch, by default of a model with BatchNorm."""
    data = ["--dataset", "synthetic", "--synthetic-size", samples, "--image-size", 12, "--batch-size", batch]
    return [*data, "--model", model, "--epochs", 2, "--no-tensorboard", "--log-every", 1, *more]


def stop_message(step: int, folder: Path) -> str:
    return (
        f"train: rank 0: received SIGTERM: stopped after step {step} with a snapshot in {folder}; "
        "run the same command to resume\n"
    )


def test_sigterm_to_torchrun_stops_every_rank_at_one_step(tmp_path: Path) -> None:
    """Although data-loading workers get it, too."""
    run = launch.start_torchrun(2, launch.MAIN, *flags("--workers", 2, "--out", tmp_path))
    wait_for_step(tmp_path, MID_EPOCH, run)
    run.signal(signal.SIGTERM)
    run.wait()
    status = read_status(tmp_path)
    assert status["state"] == "preempted"
    assert MID_EPOCH <= status["step"] < 160
    messages = [line for line in run.stderr.splitlines(keepends=True) if line.startswith("train:")]
    assert messages == [stop_message(status["step"], tmp_path)]
    assert "DataLoader worker" not in run.stderr
    assert 'File "' not in run.stderr.partition("train: rank 0")[0]
    assert read_snapshot(tmp_path)["step"] == status["step"]


def test_repeated_sigterm_to_one_rank_stops_all(tmp_path: Path) -> None:
    ranks = launch.train_ranks(2, *flags("--out", tmp_path))
    wait_for_step(tmp_path, MID_EPOCH, *ranks)
    while not all(rank.ended() for rank in ranks):
        ranks[1].signal(signal.SIGTERM)
        if read_status(tmp_path)["state"] == "preempted":  # as torchrun does when the first rank has exited
            ranks[0].signal(signal.SIGTERM)
    assert [rank.wait() for rank in ranks] == [143, 143], ranks[0].stderr + ranks[1].stderr
    status = read_status(tmp_path)
    assert status["state"] == "preempted"
    assert ranks[0].stderr == stop_message(status["step"], tmp_path)
    assert ranks[1].stderr == ""


def end_in_validation(folder: Path, *ranks: launch.Run) -> None:
    """Send SIGTERM to the last rank while all validate."""
    launch.until(
        lambda: (folder / "validating").exists() or any(rank.ended() for rank in ranks), "validation starts"
    )
    ranks[-1].signal(signal.SIGTERM)
    (folder / "continue").touch()
    assert [rank.wait() for rank in ranks] == [143] * len(ranks), "".join(rank.stderr for rank in ranks)


def test_sigterm_during_evaluate_changes_nothing(tmp_path: Path) -> None:
    own, folder = flags("--epochs", 1, samples=16), tmp_path / "trained"
    launch.succeeded([launch.start_train(*own, "--out", folder)])
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    evaluate = ("--out", folder, "--evaluate", "--eval-batch-size", 1)
    run = launch.start(WAITING, tmp_path, *own, *evaluate)
    end_in_validation(tmp_path, run)
    assert run.stderr == "train: rank 0: received SIGTERM: the evaluation was stopped\n"
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


def test_sigterm_during_an_evaluation_within_an_epoch_saves_the_weights_that_are_trained(
    tmp_path: Path,
) -> None:
    """Not their average, with which the model is evaluated. The resumed run evaluates that step, once."""
    own = flags(
        *("--eval-every", 3, "--eval-batch-size", 1, "--keep-best", 4, "--best-metric", "loss"),
        *("--ema", 0.8, "--epochs", 1, "--image-size", 8),
        samples=40,
        model="small",
    )
    whole, folder = tmp_path / "whole", tmp_path / "stopped"
    uninterrupted = launch.train_ranks(2, *own, "--save-every", 3, "--out", whole)
    ranks = launch.start_ranks(2, WAITING, tmp_path, *own, "--out", folder)
    end_in_validation(tmp_path, *ranks)
    assert [rank.stderr for rank in ranks] == [stop_message(3, folder), ""]
    launch.succeeded(uninterrupted)
    compared = ("step", "model", "optimizer", "hook_tensors")
    saved, expected = read_snapshot(folder), read_snapshot(whole, full.PREVIOUS)
    assert differing_paths(*({key: state[key] for key in compared} for state in (saved, expected))) == []
    assert saved["hook_tensors"].keys() == {f"ema.{name}" for name in saved["model"]}
    assert read_metrics(folder, "evaluation") == []
    with (folder / "metrics.jsonl").open("a") as file:
        # What a resumed run leaves that is killed after this evaluation.
        file.write('{"kind": "evaluation", "step": 3}\n')
    launch.succeeded(launch.train_ranks(2, *own, "--out", folder))
    assert (
        differing_paths(*({key: read_snapshot(out)[key] for key in compared} for out in (whole, folder)))
        == []
    )
    assert [figures(line) for line in read_metrics(folder)] == [figures(line) for line in read_metrics(whole)]
    assert {path.name for path in whole.glob("best*")} == {"best.pt", "best-step-3.pt", "best-step-5.pt"}
    for path in whole.glob("best*"):
        kept = (torch.load(out / path.name, weights_only=True) for out in (whole, folder))
        assert differing_paths(*kept) == []


def figures(line: dict[str, Any]) -> dict[str, Any]:
    """Return a line of metrics.jsonl without what depends on the clock."""
    return {name: value for name, value in line.items() if name not in CLOCK_FIELDS}


# In place of torch: reports that the import has begun, and delays it.
SLOW_IMPORT = """
import multiprocessing, os, pathlib, sys, time
name = multiprocessing.current_process().name
pathlib.Path(os.environ["SEEN"], name).touch()
time.sleep(600 if os.environ["SLOW"] == name else 0.2)
sys.path.remove(os.environ["SEEN"])
del sys.modules["torch"]
import torch
sys.path.insert(0, os.environ["SEEN"])
"""
# A shell makes what it starts in the background ignore SIGINT, and that may include these tests.
HEED_SIGINT = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); "


def start_importing(folder: Path, code: str, *, slow: str, processes: int) -> launch.Run:
    """Start `python -c CODE` and wait until torch is being imported in that many processes. The import never
    ends in the process named `slow`."""
    (folder / "torch").mkdir()
    (folder / "torch" / "__init__.py").write_text(SLOW_IMPORT)
    path = f"{folder}{os.pathsep}{launch.ROOT}"
    run = launch.start_cold("-c", HEED_SIGINT + code, PYTHONPATH=path, SEEN=folder, SLOW=slow)
    launch.until(lambda: len([*folder.glob("*Process*")]) == processes or run.ended(), "torch is imported")
    return run


def test_ctrl_c_during_the_import_of_torch_ends_the_process_silently(tmp_path: Path) -> None:
    code = (
        f"import runpy, sys; sys.argv = ['main.py']; runpy.run_path({str(launch.MAIN)!r}, "
        "run_name='__main__')"
    )
    run = start_importing(tmp_path, code, slow="MainProcess", processes=1)
    run.signal(signal.SIGINT)
    assert (run.wait(), run.stderr) == (-signal.SIGINT, "")


def test_sigint_to_the_parent_alone_ends_a_spawned_rank_during_its_import(tmp_path: Path) -> None:
    argv = [str(word) for word in flags("--spawn", 1, "--epochs", 10_000, "--out", tmp_path / "out")]
    code = (
        "from train import main; from train.distributed import spawn; spawn.SIGINT_GRACE = 0; "
        f"main.exit_process(main.main({argv!r}))"
    )
    run = start_importing(tmp_path, code, slow="", processes=2)
    run.signal(signal.SIGINT)
    # Returns only when the rank has closed its ends of the pipes.
    assert (run.wait(), run.stdout, run.stderr) == (130, "", "")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_ends_a_rank_that_waits_for_the_others(number: signal.Signals, tmp_path: Path) -> None:
    shared = launch.rendezvous(2)
    run = launch.start_train(*flags("--out", tmp_path), RANK=0, LOCAL_RANK=0, **shared)
    launch.until(lambda: launch.is_listening(int(str(shared["MASTER_PORT"]))), "rank 0 waits")
    run.signal(number)
    assert run.wait() == -number
    assert run.stderr == ""


def test_rendezvous_timeout_is_one_sentence(tmp_path: Path) -> None:
    run = launch.start_train(
        *flags("--timeout", 1, "--out", tmp_path), RANK=0, LOCAL_RANK=0, **launch.rendezvous(2)
    )
    assert run.wait() == 1
    assert "train: rank 0: rendezvous of 2 ranks failed (" in run.stderr
    assert "Traceback" not in run.stderr


def test_sigterm_to_the_parent_of_a_spawned_rank_is_forwarded(tmp_path: Path) -> None:
    run = launch.start_train(*flags("--spawn", 1, "--epochs", 9, "--out", tmp_path))
    wait_for_step(tmp_path, MID_EPOCH, run)
    os.kill(run.pid, signal.SIGTERM)
    assert run.wait() == 143, run.stderr
    status = read_status(tmp_path)
    assert status["state"] == "preempted"
    assert run.stderr == stop_message(status["step"], tmp_path)


def test_death_of_a_rank_ends_the_others_with_one_sentence(tmp_path: Path) -> None:
    *ranks, victim = launch.train_ranks(3, *flags("--save-every", 4, "--out", tmp_path))
    wait_for_step(tmp_path, MID_EPOCH, *ranks)
    victim.signal(signal.SIGKILL)
    assert victim.wait() == -signal.SIGKILL
    for number, rank in enumerate(ranks):
        assert rank.wait() == 1
        (line,) = rank.stderr.splitlines()
        step = int(line.removeprefix(f"train: rank {number}: after step ").partition(":")[0])
        saved = read_snapshot(tmp_path)["step"]
        assert step >= saved
        assert f"after step {step}: {LOST}" in line
        assert saved in promised_steps(line)
    assert read_status(tmp_path)["state"] == "failed"
    assert LOST in read_status(tmp_path)["error"]


@linux_only
def test_death_of_a_rank_during_a_transfer_ends_the_other(tmp_path: Path) -> None:
    """gloo does not wake up a wait for such a transfer: only --timeout (600 s) would end it."""
    out = tmp_path / "out"
    script = [launch.CHECKS / "break_transfer.py", 6, 1, tmp_path]  # rank 1 sends
    ranks = launch.start_ranks(2, *script, *flags("--save-every", 4, "--out", out))
    launch.until(lambda: is_stopped(ranks[0].pid), "the receiver is stopped")
    (tmp_path / "stopped").touch()
    launch.until((tmp_path / "sent").exists, "a part of the tensor is sent")
    ranks[1].signal(signal.SIGKILL)
    assert ranks[1].wait() == -signal.SIGKILL
    ranks[0].signal(signal.SIGCONT)
    assert ranks[0].wait() == 1
    (line,) = ranks[0].stderr.splitlines()
    assert line.startswith(f"train: rank 0: after step 5: {LOST}")
    assert promised_steps(line) == [4]
    status = read_status(out)
    assert (status["state"], status["step"]) == ("failed", 5)
    assert status["error"].startswith(f"after step 5: {LOST}")


def test_rank_that_writes_a_snapshot_survives_the_death_of_another(tmp_path: Path) -> None:
    grace = 0.5
    script = [launch.CHECKS / "short_grace.py", grace]
    ranks = launch.start_ranks(2, *script, *flags("--save-every", 4, "--epochs", 9, "--out", tmp_path))
    wait_for_step(tmp_path, MID_EPOCH, *ranks)
    pipe = full.temporary_file(tmp_path / full.NAME, 0)
    launch.until(lambda: make_pipe(pipe), "no snapshot is being written")
    with pipe.open("rb") as file:  # returns once the rank has opened it, too
        assert file.read(1)
        ranks[1].signal(signal.SIGKILL)
        assert ranks[1].wait() == -signal.SIGKILL
        time.sleep(3 * grace)
        assert not ranks[0].ended()
        file.read()
    assert ranks[0].wait() == 1
    assert LOST in ranks[0].stderr


def make_pipe(path: Path) -> bool:
    """Make a named pipe, unless the file exists."""
    try:
        os.mkfifo(path)
    except FileExistsError:
        return False
    return True


def is_stopped(pid: int) -> bool:
    """Return whether SIGSTOP has stopped the process."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


def promised_steps(line: str) -> list[int]:
    """Return the steps from which the message says that the same command resumes."""
    other = r"(?:, or from step (\d+) if that was saved)?"
    match = re.search(rf"\); the same command resumes from the snapshot of step (\d+){other}$", line)
    assert match, line
    return [int(step) for step in match.groups() if step]


@linux_only
def test_full_disk_of_one_rank_stops_all_and_keeps_the_old_snapshot(tmp_path: Path) -> None:
    launch.succeeded(launch.train_ranks(2, *flags("--epochs", 1, "--out", tmp_path)))
    before = (tmp_path / full.NAME).read_bytes()
    ranks = launch.train_ranks(2, *flags("--out", tmp_path))
    limit_file_size(ranks[0], 100_000)  # more than the lines of two epochs take, less than a snapshot
    assert [rank.wait() for rank in ranks] == [1, 1], ranks[0].stderr + ranks[1].stderr
    (first,), (other,) = (rank.stderr.splitlines() for rank in ranks)
    assert first.startswith(f"train: rank 0: cannot write {tmp_path / 'best.pt'} (")
    assert first.endswith("); the one before it is kept")
    assert other == "train: rank 1: stopped because another rank could not write the best weights"
    assert read_status(tmp_path)["state"] == "failed"
    assert (tmp_path / full.NAME).read_bytes() == before
    assert full.load_local(tmp_path) is not None
    assert not list(tmp_path.glob(full.TEMPORARY_FILES))


@linux_only
def test_disk_too_full_for_metrics_is_one_sentence(tmp_path: Path) -> None:
    run = launch.start_train(*flags("--epochs", 9, "--out", tmp_path))
    wait_for_step(tmp_path, MID_EPOCH, run)
    limit_file_size(run, 10)
    assert run.wait() == 1
    (line,) = run.stderr.splitlines()
    assert line.startswith("train: rank 0: [Errno 27] File too large")
    assert line.endswith(": free some space there, or give another --out")


def limit_file_size(run: launch.Run, size: int) -> None:
    """Let no file that `run` writes grow beyond `size` bytes; pipes are not limited."""
    resource.prlimit(run.pid, resource.RLIMIT_FSIZE, (size, size))


@linux_only
def test_spawned_rank_that_is_killed_has_the_exit_code_that_a_shell_reports(tmp_path: Path) -> None:
    run = launch.start_train(*flags("--spawn", 1, "--epochs", 99, "--out", tmp_path))
    wait_for_step(tmp_path, MID_EPOCH, run)
    children = Path(f"/proc/{run.pid}/task/{run.pid}/children").read_text().split()
    (rank,) = (pid for pid in children if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes())
    os.kill(int(rank), signal.SIGKILL)
    assert run.wait() == 137, run.stderr
    assert "Traceback" not in run.stderr


def test_ctrl_c_is_one_sentence(tmp_path: Path) -> None:
    run = launch.start_train(*flags("--out", tmp_path))
    wait_for_step(tmp_path, MID_EPOCH, run)
    run.signal(signal.SIGINT)
    assert run.wait() == 130
    message = "interrupted; run the same command to resume from the newest snapshot, if there is one"
    assert run.stderr == f"train: rank 0: {message}\n"
