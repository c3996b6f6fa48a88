"""The trainer as users start it: torchrun, environment variables, tcp and file rendezvous, one process."""

from __future__ import annotations

import re
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from support.training import launch
from support.training.dataset_files import write_mnist
from support.training.output import (
    differing_paths,
    max_difference,
    read_metrics,
    read_snapshot,
    read_status,
    read_weights,
)

from train import models

pytestmark = [pytest.mark.torch, pytest.mark.xdist_group("train_run")]
TINY = [*launch.TINY, "--epochs", 3]
LAST_LINE = r"test accuracy (0\.\d{4}) \(best (0\.\d{4}) at epoch (\d+)\) after (\d+) epochs?, \d+\.\d s"


def test_digits_are_learned_by_two_ranks(tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    run = launch.forked_torchrun(2, launch.MAIN, "--dataset", "digits", cwd=tmp_path)
    assert run.code == 0, run.stdout + run.stderr
    out = tmp_path / "runs" / "digits"

    *rest, last = run.stdout.splitlines()
    joined, epochs = sorted(rest[:2]), rest[2:]
    assert joined == [f"rank {rank} of 2 joined on cpu" for rank in range(2)]
    assert [line.split()[1] for line in epochs] == [f"{epoch}/8" for epoch in range(1, 9)]
    match = re.fullmatch(LAST_LINE, last)
    assert match, last
    assert float(match[1]) >= 0.97

    status = read_status(out)
    assert (status["state"], status["epoch"], status["step"], status["world_size"]) == ("finished", 8, 184, 2)
    assert f"{status['best_accuracy']:.4f}" == match[2]

    lines = read_metrics(out, "epoch")
    assert [line["epoch"] for line in lines] == list(range(1, 9))
    assert {line["test_samples"] for line in lines} == {359}
    assert {line["samples"] for line in lines} == {1438}
    pytest.importorskip("tensorboard")
    assert list((out / "tensorboard").glob("events.out.tfevents.*"))


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The weights of one process without a process group."""
    folder = tmp_path_factory.mktemp("single")
    launch.succeeded([launch.start(launch.MAIN, *TINY, "--out", folder)])
    return read_weights(folder)


def test_ranks_train_as_one_process_however_they_are_started(tmp_path: Path, single: dict[str, Any]) -> None:
    weights = {}
    for form in ("env", "tcp", "file"):
        runs = launch.succeeded(start_two_ranks(form, tmp_path / form))
        lines = sorted(line for run in runs for line in run.stdout.splitlines())
        assert lines[-3:-1] == [f"rank {rank} of 2 joined on cpu" for rank in range(2)]
        assert re.fullmatch(LAST_LINE, lines[-1])
        weights[form] = read_weights(tmp_path / form)
    assert max_difference(weights["env"], single) < 1e-6
    assert all(differing_paths(weights[form], weights["env"]) == [] for form in ("tcp", "file"))
    # Only rank 0 writes snapshots.
    assert (tmp_path / "second node").is_dir()
    assert not (tmp_path / "second node" / "snapshot.pt").exists()


def start_two_ranks(form: str, out: Path) -> list[launch.Run]:
    argv = [launch.MAIN, *TINY, "--out", out]
    if form == "env":
        # As on two nodes with a process and a disk each: both are local rank 0.
        shared = launch.rendezvous(2)
        second = [*argv, "--out", out.with_name("second node")]
        return [
            launch.start(*words, RANK=rank, LOCAL_RANK=0, **shared)
            for rank, words in enumerate((argv, second))
        ]
    address = {"tcp": f"tcp://127.0.0.1:{launch.free_port()}", "file": f"file://{out}.rendezvous"}[form]
    own = [*argv, "--init-method", address, "--world-size", 2]
    return [launch.start(*own, rank, rank) for rank in range(2)]


def test_nodes_with_different_numbers_of_ranks_train_as_one_process(
    tmp_path: Path, single: dict[str, Any]
) -> None:
    own = [launch.FORKED_TORCHRUN, "--nnodes=2", "--rdzv-id=mixed", "--rdzv-backend=c10d"]
    own += [f"--rdzv-endpoint=127.0.0.1:{launch.free_port()}", "--local-addr=127.0.0.1"]
    argv = [launch.MAIN, *TINY, "--out", tmp_path / "out"]
    nodes = [launch.start(*own, f"--nproc-per-node={ranks}", *argv) for ranks in (2, 1)]
    launch.succeeded(nodes)
    output = "".join(node.stdout for node in nodes)
    assert all(f"rank {rank} of 3 joined" in output for rank in range(3))
    assert max_difference(read_weights(tmp_path / "out"), single) < 1e-6


def test_toy_regression_learns(tmp_path: Path) -> None:
    printed = ["--print-steps", "--log-every", 8]
    run = launch.start_train(
        "--dataset", "toy", "--no-tensorboard", *printed, "--epochs", 3, "--out", tmp_path
    )
    assert run.wait() == 0, run.stderr
    assert run.stdout.startswith("Epoch: [1][8/64]\t")
    losses = [line["test_loss"] for line in read_metrics(tmp_path, "epoch")]
    assert losses[2] < losses[1] < losses[0]
    status = read_status(tmp_path)
    assert status["test_loss"] == losses[2]
    assert not [name for name in status if "accuracy" in name]
    assert re.fullmatch(
        r"test loss (\S+) \(best \1 at epoch 3\) after 3 epochs, \d+\.\d s", run.stdout.splitlines()[-1]
    )


def test_rank_that_crashes_is_resumed_to_the_same_weights(tmp_path: Path, single: dict[str, Any]) -> None:
    argv = [*TINY, "--out", tmp_path, "--save-every", 2]
    crash = ["--fail-rank", 0, "--fail-code", 7, "--fail-step", 8]
    assert launch.start_train(*argv, *crash).wait() == 7
    assert read_status(tmp_path)["state"] == "running"
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "epoch", "step": 10, "epoch": 2}\n')  # a step that no snapshot holds
        file.write('{"kind": "epoch", "st')  # what a kill in the middle of a write leaves

    resumed = launch.start_train(*argv, *crash)
    assert resumed.wait() == 0, resumed.stderr
    assert resumed.stdout.startswith("resumed at step 6 (epoch 1)")
    assert differing_paths(read_weights(tmp_path), single) == []
    assert [line["step"] for line in read_metrics(tmp_path, "epoch")] == [5, 10, 15]

    again = launch.start_train(*argv)
    assert again.wait() == 0
    first, last = again.stdout.splitlines()
    assert first.endswith("training is already complete; --fresh starts again")
    assert re.fullmatch(LAST_LINE, last)
    assert differing_paths(read_weights(tmp_path), single) == []


def test_fresh_replaces_the_snapshots_of_another_run(tmp_path: Path) -> None:
    argv = [*TINY, "--epochs", 1, "--out", tmp_path]
    launch.succeeded([launch.start_train(*argv)])
    # So small a learning rate leaves the weights as the seed has initialized them.
    launch.succeeded([launch.start_train(*argv, "--seed", 3, "--fresh", "--lr", "1e-30")])
    initial = models.build("small", shape=(3, 8, 8), classes=10, seed=3).state_dict()
    assert differing_paths(read_weights(tmp_path), dict(initial)) == []

    assert read_status(tmp_path)["state"] == "finished"
    crashed = launch.start_train(*argv, "--seed", 4, "--fresh", "--fail-rank", 0)
    assert crashed.wait() == 1
    assert (read_status(tmp_path)["state"], read_status(tmp_path)["step"]) == ("running", 0)


def test_local_rank_0_of_every_node_writes_with_snapshot_per_node(tmp_path: Path) -> None:
    # BatchNorm's statistics would differ between the ranks if they were not synchronized.
    batchnorm = ["--model", "mnist", "--image-size", 12]
    argv = [*TINY, *batchnorm, "--snapshot-per-node", "--save-every", 4]
    shared = launch.rendezvous(2)
    launch.succeeded(
        [
            launch.start_train(*argv, "--out", tmp_path / f"node{node}", RANK=node, LOCAL_RANK=0, **shared)
            for node in range(2)
        ]
    )
    for name, step in (("snapshot.prev.pt", 12), ("snapshot.pt", 15)):  # in mid-epoch, and after a validation
        one, other = (read_snapshot(tmp_path / f"node{node}", name) for node in range(2))
        assert (one["step"], other["step"]) == (step, step)
        assert differing_paths(one["model"], other["model"]) == []
    assert not (tmp_path / "node1" / "metrics.jsonl").exists()


def test_only_local_rank_0_downloads(tmp_path: Path) -> None:
    pytest.importorskip("torchvision")
    write_mnist(tmp_path / "source", samples=4)
    flags = ["--dataset", "mnist", "--data", tmp_path / "data", "--out", tmp_path / "out", "--no-tensorboard"]
    words = (launch.CHECKS / "fake_download.py", *flags, "--download", "--epochs", 1)
    ranks = launch.run_ranks(2, *words, SOURCE=tmp_path / "source")
    downloads = [line for one in ranks for line in one.stdout.splitlines() if line.endswith("downloads")]
    assert downloads == ["rank 0 downloads"]


def test_importing_train_changes_nothing_for_the_process(tmp_path: Path) -> None:
    """And running it changes only what its flags request."""
    run = launch.run(launch.CHECKS / "import_side_effects.py", tmp_path)
    assert run.code == 0, run.stderr


def test_exploding_loss_ends_every_rank_with_one_sentence(tmp_path: Path) -> None:
    flags = ("--lr", "1e30", "--save-every", 1)
    ranks = launch.wait(*launch.train_ranks(2, *TINY, *flags, "--out", tmp_path))
    assert [rank.code for rank in ranks] == [1, 1]
    message = "step 2: the loss is nan; stopped before updating the weights; the snapshot of step 1 is kept; "
    advice = "use a lower --lr or --clip, or check the data"
    assert [rank.stderr for rank in ranks] == [
        f"train: rank {number}: {message}{advice}\n" for number in range(2)
    ]
    status = read_status(tmp_path)
    assert (status["state"], status["error"]) == ("failed", message + advice)
    assert read_snapshot(tmp_path)["step"] == 1


def test_port_in_use_is_reported() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        run = launch.start_train(*TINY, "--init-method", address, "--world-size", 2, "--timeout", 5, 0, 0)
        assert run.wait() == 1
    assert run.stderr.splitlines()[-1].endswith(
        "the port is in use: stop the earlier run, or give all ranks another port"
    )
    assert "Traceback" not in run.stderr


def test_out_of_memory_ends_the_run_with_one_sentence(tmp_path: Path) -> None:
    run = launch.start_train(*TINY, "--synthetic-size", 10**13, "--out", tmp_path)
    assert run.wait() == 1
    assert "out of memory" in run.stderr
    assert "use a smaller --batch-size" in run.stderr
    assert "Traceback" not in run.stderr


def test_second_run_in_the_same_folder_is_refused(tmp_path: Path) -> None:
    out = tmp_path / "out"
    first = launch.start_train(*TINY, "--epochs", 100_000, "--out", out)
    launch.until((out / "status.json").exists, "the first run trains")
    second = launch.start_train(*TINY, "--out", out)
    assert second.wait() == 2
    first.kill_session()
    assert first.wait() == -signal.SIGKILL
    assert "another run is writing to this folder" in second.stderr
    assert "Traceback" not in second.stderr
    third = launch.start_train(*TINY, "--fresh", "--out", out)
    assert third.wait() == 0, third.stderr  # a killed run leaves no lock


def test_links_in_the_folder_do_not_change_files_elsewhere(tmp_path: Path) -> None:
    out, precious = tmp_path / "out", tmp_path / "precious"
    out.mkdir()
    precious.write_text("precious")
    for name in (".status.json.tmp", ".metrics.jsonl.tmp"):
        (out / name).symlink_to(precious)
    launch.succeeded([launch.start_train(*TINY, "--epochs", 1, "--out", out)])
    assert precious.read_text() == "precious"
    (out / ".lock").unlink()
    (out / ".lock").symlink_to(precious)
    run = launch.start_train(*TINY, "--epochs", 1, "--out", out)
    assert run.wait() == 2, run.stderr
    assert f"--out {out}: .lock is a symbolic link; remove it, or give another --out" in run.stderr
    assert precious.read_text() == "precious"


def test_run_continues_when_nobody_reads_its_output(tmp_path: Path) -> None:
    command = '"$@" | head -n 1; exit "${PIPESTATUS[0]}"'
    words = [sys.executable, launch.MAIN, *TINY, "--epochs", 3, "--out", tmp_path]
    done = subprocess.run(
        ["bash", "-c", command, "bash", *map(str, words)],
        env=launch.environment(),
        capture_output=True,
        text=True,
        timeout=launch.HANG,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert len(done.stdout.splitlines()) == 1
    assert read_status(tmp_path)["state"] == "finished"


@pytest.mark.parametrize(("how", "lr", "code"), [("success", 0.1, 0), ("failure", 1e30, 1), ("bug", 0.1, 1)])
def test_model_is_not_freed_before_the_process_exits(how: str, lr: float, code: int, tmp_path: Path) -> None:
    # torch 2.11 frees it while holding the interpreter's lock, and waits for a thread of gloo that may want
    # the lock.
    script = launch.CHECKS / "count_models_at_exit.py"
    one_rank = {**launch.rendezvous(1), "RANK": 0}
    run = launch.run(script, how, *TINY, "--lr", lr, "--out", tmp_path, **one_rank)
    assert (run.code, run.stdout.splitlines()[-1]) == (code, "models 1"), run.stderr
    assert ("ZeroDivisionError" in run.stderr) is (how == "bug")


SLOW = """
import os, runpy, sys, time
import torch.distributed as dist
from train.distributed.communicator import Communicator
ended, agreed = dist.destroy_process_group, Communicator.any
if os.environ["RANK"] == "0":
    dist.destroy_process_group = lambda: (time.sleep(2), ended())
    Communicator.any = lambda *args: (agreed(*args), time.sleep(2))[0]
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_torchrun_shows_one_sentence_of_the_rank_that_failed_first(tmp_path: Path) -> None:
    """Only local rank 0 looks for the data at first; the other one ends because of it, and sooner, since rank
    0 takes longer to go on after all know of the failure, and to clean up."""
    slow = tmp_path / "slow.py"
    slow.write_text(SLOW)
    flags = ["--dataset", "folder", "--data", tmp_path / "missing", "--out", tmp_path / "out"]
    run = launch.torchrun(2, slow, launch.MAIN, *flags)
    assert run.code == 1  # torchrun's, independent of those of the ranks
    assert "exitcode  : 2" in run.stderr
    _, root_cause = run.stderr.split("Root Cause (first observed failure):")
    assert re.search(r"^  rank +: 0 ", root_cause, re.MULTILINE)
    (shown,) = re.findall(r"^  traceback : (.*)\n", root_cause, re.MULTILINE)
    assert str(tmp_path / "missing") in shown
    assert "train/run.py" not in run.stderr
