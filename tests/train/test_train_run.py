"""The trainer as users start it: torchrun, environment variables, tcp and file rendezvous, one process."""

from __future__ import annotations

import json
import re
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from support.training import launch
from support.training.dataset_files import write_mnist, write_stl10
from support.training.output import (
    differing_paths,
    max_difference,
    read_metrics,
    read_snapshot,
    read_status,
    read_weights,
)

from train import models
from train.distributed.spawn import reserved_port

pytestmark = [pytest.mark.torch, pytest.mark.xdist_group("train_run")]
QUIET = ["--no-tensorboard"]
DATA = ["--dataset", "synthetic", "--synthetic-size", 40, "--image-size", 8, "--batch-size", 8]
TINY = [*DATA, "--epochs", 3, *QUIET]
LAST_LINE = r"test accuracy (0\.\d{4}) \(best (0\.\d{4}) at epoch (\d+)\) after (\d+) epochs?, \d+\.\d s"


def test_digits_are_learned_by_two_ranks_of_a_copy_of_the_folder(tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    shutil.copytree(launch.ROOT / "train", tmp_path / "train", ignore=shutil.ignore_patterns("__pycache__"))
    run = launch.torchrun(2, "-m", "train.main", "--dataset", "digits", cwd=tmp_path)
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


@pytest.fixture(scope="module")
def starts_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("starts")


@pytest.fixture(scope="module")
def starts(starts_folder: Path) -> dict[str, dict[str, Any]]:
    """The weights of two ranks for each way to start them without torchrun."""
    weights = {}
    for form in ("env", "tcp", "file", "spawn"):
        out = starts_folder / form
        runs = launch.succeeded(start_two_ranks(form, out))
        lines = sorted(line for run in runs for line in run.stdout.splitlines())
        assert lines[-3:-1] == [f"rank {rank} of 2 joined on cpu" for rank in range(2)]
        assert re.fullmatch(LAST_LINE, lines[-1])
        weights[form] = read_weights(out)
    return weights


def start_two_ranks(form: str, out: Path) -> list[launch.Run]:
    argv = [launch.MAIN, *TINY, "--out", out]
    if form == "spawn":
        return [launch.start(*argv, "--spawn", 2)]
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


@pytest.mark.parametrize("form", ["tcp", "file", "spawn"])
def test_weights_do_not_depend_on_how_ranks_are_started(form: str, starts: dict[str, dict[str, Any]]) -> None:
    assert differing_paths(starts[form], starts["env"]) == []


def test_ranks_started_by_hand_train_as_one_process(
    starts: dict[str, dict[str, Any]], single: dict[str, Any]
) -> None:
    assert max_difference(starts["env"], single) < 1e-6


def test_only_rank_0_writes_snapshots(starts: dict[str, dict[str, Any]], starts_folder: Path) -> None:
    assert (starts_folder / "second node").is_dir()
    assert not (starts_folder / "second node" / "snapshot.pt").exists()


@pytest.mark.skipif(sys.platform != "linux", reason="the port is not reserved elsewhere")
def test_port_of_spawned_ranks_is_reserved_but_can_be_listened_on() -> None:
    with reserved_port() as port:
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.1", port))
        with socket.socket() as store:
            store.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as torch does
            store.bind(("", port))
            store.listen()
            assert launch.is_listening(port)


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
    run = launch.start_train("--dataset", "toy", *QUIET, "--epochs", 3, "--out", tmp_path)
    assert run.wait() == 0, run.stderr
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
    refused = launch.start_train(*argv, "--seed", 3)
    assert refused.wait() == 2
    assert "--seed 3 (was 0)" in refused.stderr
    assert "Traceback" not in refused.stderr

    # So small a learning rate leaves the weights as the seed has initialized them.
    launch.succeeded([launch.start_train(*argv, "--seed", 3, "--fresh", "--lr", "1e-30")])
    initial = models.build("small", shape=(3, 8, 8), classes=10, seed=3).state_dict()
    assert differing_paths(read_weights(tmp_path), dict(initial)) == []

    assert read_status(tmp_path)["state"] == "finished"
    crashed = launch.start_train(*argv, "--seed", 4, "--fresh", "--fail-rank", 0)
    assert crashed.wait() == 1
    assert (read_status(tmp_path)["state"], read_status(tmp_path)["step"]) == ("running", 0)


def test_loading_workers_do_not_change_the_result(tmp_path: Path, single: dict[str, Any]) -> None:
    launch.succeeded([launch.start_train(*TINY, "--workers", 1, "--out", tmp_path)])
    assert differing_paths(read_weights(tmp_path), single) == []


def test_resnet18_trains_on_stl10_files_in_bf16(tmp_path: Path) -> None:
    pytest.importorskip("torchvision")
    write_stl10(tmp_path, samples=6)
    flags = ["--dataset", "stl10", "--data", tmp_path, "--image-size", 32, "--batch-size", 3, "--amp", "bf16"]
    flags += ["--print-steps", "--log-every", 1, "--deterministic"]
    run = launch.start_train(*flags, *QUIET, "--epochs", 1, "--out", tmp_path / "out")
    assert run.wait() == 0, run.stderr
    steps = [line for line in run.stdout.splitlines() if line.startswith("Epoch: ")]
    assert [line.split("\t")[0] for line in steps] == ["Epoch: [1][1/2]", "Epoch: [1][2/2]"]
    figure = r"\d+\.\d+ \(\d+\.\d+\)"
    names = ("Time", "Data", "Loss", "Prec@1", "Prec@5")
    assert re.fullmatch("\t".join([r"Epoch: \S+", *(f"{name} {figure}" for name in names)]), steps[1])
    assert re.fullmatch(LAST_LINE, run.stdout.splitlines()[-1])
    assert read_weights(tmp_path / "out")["fc.weight"].shape == (10, 512)


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


def test_missing_data_ends_every_rank_with_exit_code_2(tmp_path: Path) -> None:
    pytest.importorskip("torchvision")
    flags = ["--dataset", "mnist", "--data", tmp_path, "--out", tmp_path / "out"]
    ranks = launch.wait(*launch.train_ranks(2, *flags))
    assert [rank.code for rank in ranks] == [2, 2]
    assert "train: rank 0: cannot read MNIST in " in ranks[0].stderr
    assert ranks[1].stderr == "train: rank 1: stopped because another rank could not load the data\n"
    assert "Traceback" not in ranks[0].stderr


@pytest.mark.xdist_group("train_pipeline")
def test_only_local_rank_0_downloads(tmp_path: Path) -> None:
    pytest.importorskip("torchvision")
    write_mnist(tmp_path / "source", samples=4)
    flags = ["--dataset", "mnist", "--data", tmp_path / "data", "--out", tmp_path / "out", *QUIET]
    words = (launch.CHECKS / "fake_download.py", *flags, "--download", "--epochs", 1)
    ranks = launch.run_ranks(2, *words, SOURCE=tmp_path / "source")
    downloads = [line for one in ranks for line in one.stdout.splitlines() if line.endswith("downloads")]
    assert downloads == ["rank 0 downloads"]


def test_importing_train_changes_nothing_for_the_process(tmp_path: Path) -> None:
    """And running it changes only what its flags request."""
    run = launch.run(launch.CHECKS / "import_side_effects.py", tmp_path)
    assert run.code == 0, run.stderr


@pytest.mark.parametrize(
    ("flags", "kept"),
    [((), "there is no snapshot yet"), (("--save-every", 1), "the snapshot of step 1 is kept")],
)
def test_exploding_loss_ends_every_rank_with_one_sentence(
    tmp_path: Path, flags: tuple[object, ...], kept: str
) -> None:
    ranks = launch.wait(*launch.train_ranks(2, *TINY, "--lr", "1e30", *flags, "--out", tmp_path))
    assert [rank.code for rank in ranks] == [1, 1]
    message = f"step 2: the loss is nan; stopped before updating the weights; {kept}; "
    advice = "use a lower --lr or --clip, or check the data"
    assert [rank.stderr for rank in ranks] == [
        f"train: rank {number}: {message}{advice}\n" for number in range(2)
    ]
    status = read_status(tmp_path)
    assert (status["state"], status["error"]) == ("failed", message + advice)
    assert (tmp_path / "snapshot.pt").exists() == bool(flags)


@pytest.mark.parametrize(
    ("argv", "env", "message"),
    [
        (["--device", "cuda"], {}, "finds no GPU"),
        (["--init-method", "tcp://127.0.0.1:1"], {}, "RANK LOCAL_RANK"),
        (["0", "0"], {"WORLD_SIZE": 2}, "MASTER_ADDR and MASTER_PORT"),
        (["2", "0"], {"WORLD_SIZE": 2}, "not in 0..1"),
        ([], {"RANK": 0}, "WORLD_SIZE"),
        (
            ["--init-method", "tcp://nohost:99999", "--world-size", 2, 0, 0],
            {},
            "invalid rendezvous address (Port out",
        ),
        (["--init-method", "file:///no/such", "--world-size", 2, 0, 0], {}, "the folder does not exist"),
        (["--resume", "require", "--out", "nowhere"], {}, "no rank has a valid snapshot"),
        (["--spawn", "2"], {"TORCHELASTIC_RUN_ID": "job"}, "use one of the two"),
    ],
)
def test_impossible_start_is_refused_with_advice(
    argv: list[object], env: dict[str, object], message: str, tmp_path: Path
) -> None:
    run = launch.run(launch.MAIN, *TINY, *argv, cwd=tmp_path, **env)
    assert run.code == 2, run.stderr
    assert message in run.stderr
    assert "Traceback" not in run.stderr


def test_port_in_use_is_reported() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        run = launch.start_train(*TINY, "--init-method", address, "--world-size", 2, "--timeout", 5, 0, 0)
        assert run.wait() == 1
    assert run.stderr.splitlines()[-1].endswith(
        "the port is in use: stop the earlier run, or give all ranks another port"
    )
    assert "Traceback" not in run.stderr


def test_batch_smaller_than_the_number_of_ranks_trains_with_a_warning(tmp_path: Path) -> None:
    first, second = launch.succeeded(
        launch.train_ranks(2, *TINY, "--batch-size", 1, "--epochs", 1, "--out", tmp_path)
    )
    warning = "--batch-size 1 is shared by 2 ranks: some ranks are idle in every step"
    assert first.stdout.splitlines()[1] == warning
    assert warning not in second.stdout


def test_out_of_memory_ends_the_run_with_one_sentence(tmp_path: Path) -> None:
    run = launch.start_train(*TINY, "--synthetic-size", 10**13, "--out", tmp_path)
    assert run.wait() == 1
    assert "out of memory" in run.stderr
    assert "use a smaller --batch-size" in run.stderr
    assert "Traceback" not in run.stderr


def test_output_that_cannot_be_written_ends_the_run_with_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "status.json").mkdir()
    run = launch.start_train(*TINY, "--out", tmp_path)
    assert run.wait() == 1
    assert "give another --out" in run.stderr
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


def test_status_is_copied_for_the_launcher(tmp_path: Path) -> None:
    copy = tmp_path / "copy.json"
    run = launch.start_train(*TINY, "--epochs", 1, "--out", tmp_path / "out", CLOUDDDP_STATUS_FILE=copy)
    assert run.wait() == 0, run.stderr
    assert json.loads(copy.read_text())["state"] == "finished"


def test_torchrun_shows_one_sentence_of_the_rank_that_failed_first(tmp_path: Path) -> None:
    """Only local rank 0 looks for the data at first; the other one ends because of it."""
    torchrun = (*launch.TORCHRUN, "--standalone", "--nproc-per-node=2")
    flags = ["--dataset", "folder", "--data", tmp_path / "missing", "--out", tmp_path / "out"]
    run = launch.start(*torchrun, launch.MAIN, *flags, cwd=tmp_path)
    assert run.wait() == 1
    _, root_cause = run.stderr.split("Root Cause (first observed failure):")
    assert re.search(r"^  rank +: 0 ", root_cause, re.MULTILINE)
    (shown,) = re.findall(r"^  traceback : (.*)\n", root_cause, re.MULTILINE)
    assert str(tmp_path / "missing") in shown
    assert "train/run.py" not in run.stderr
