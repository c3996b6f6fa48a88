"""The trainer as people start it: torchrun, bare environment variables, tcp and file rendezvous, one process."""

from __future__ import annotations

import json
import re
import shutil
import socket
import sys
from pathlib import Path
from typing import Any

import pytest
import train_harness as harness
from train_files import write_mnist, write_stl10

pytest.importorskip("torch")

import torch

from train import models
from train.spawn import kept_port

pytestmark = [pytest.mark.torch, pytest.mark.xdist_group("train_run")]
MAIN = harness.ROOT / "train" / "main.py"
TINY = ["--dataset", "synthetic", "--synthetic-size", 40, "--image-size", 8, "--batch-size", 8, "--epochs", 3]
QUIET = ["--no-tensorboard"]
LAST_LINE = r"test accuracy (0\.\d{4}) \(best (0\.\d{4}) at epoch (\d+)\) after (\d+) epochs, \d+\.\d s"


def status(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "status.json").read_text(encoding="utf-8"))


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


def weights(folder: Path) -> dict[str, Any]:
    return torch.load(folder / "snapshot.pt", weights_only=True)["model"]


def by_env(world: int, *argv: object) -> list[tuple[list[object], dict[str, object]]]:
    """Starts for `world` ranks that meet through environment variables alone."""
    port = harness.free_port()
    return [
        (
            [MAIN, *argv],
            {
                "RANK": rank,
                "LOCAL_RANK": rank,
                "WORLD_SIZE": world,
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": port,
            },
        )
        for rank in range(world)
    ]


def test_digits_are_learnt_by_two_ranks_of_a_copy_of_the_folder_alone(tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    shutil.copytree(harness.ROOT / "train", tmp_path / "train", ignore=shutil.ignore_patterns("__pycache__"))
    done = harness.torchrun(2, "-m", "train.main", "--dataset", "digits", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    out = tmp_path / "runs" / "digits"

    *rest, last = done.stdout.splitlines()
    joined, epochs = sorted(rest[:2]), rest[2:]
    assert joined == [f"rank {rank} of 2 joined, on cpu" for rank in range(2)]
    assert [line.split()[1] for line in epochs] == [f"{epoch}/8" for epoch in range(1, 9)]
    found = re.fullmatch(LAST_LINE, last)
    assert found, last
    assert float(found[1]) >= 0.97

    end = status(out)
    assert (end["state"], end["epoch"], end["step"], end["world_size"]) == ("finished", 8, 184, 2)
    assert f"{end['best_accuracy']:.4f}" == found[2]

    recorded = [line for line in lines(out) if line["kind"] == "epoch"]
    assert [line["epoch"] for line in recorded] == list(range(1, 9))
    assert {line["test_samples"] for line in recorded} == {359}
    assert {line["samples"] for line in recorded} == {1438}
    pytest.importorskip("tensorboard")
    assert list((out / "tensorboard").glob("events.out.tfevents.*"))


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The weights that one process without any process group arrives at."""
    folder = tmp_path_factory.mktemp("alone")
    done = harness.python(MAIN, *TINY, *QUIET, "--out", folder)
    assert done.returncode == 0, done.stderr
    return weights(folder)


@pytest.fixture(scope="module")
def meetings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """The weights of two ranks that met in each of the ways to start without torchrun."""
    found = {}
    for form in ("env", "tcp", "file", "spawn"):
        folder = tmp_path_factory.mktemp(form)
        argv = [*TINY, *QUIET, "--out", folder / "out"]
        address = {"tcp": f"tcp://127.0.0.1:{harness.free_port()}", "file": f"file://{folder}/meet"}
        starts = [([MAIN, *argv, "--spawn", 2], {})]
        if form == "env":
            # As on two nodes with a process and a disk each: the first is local rank 0, and so is the second.
            starts = by_env(2, *argv)
            starts[1] = ([MAIN, *argv, "--out", folder / "second"], {**starts[1][1], "LOCAL_RANK": 0})
        if form in address:
            own = [MAIN, *argv, "--init-method", address[form], "--world-size", 2]
            starts = [([*own, rank, rank], {}) for rank in range(2)]
        done = harness.by_hand(starts)
        assert [one.returncode for one in done] == [0] * len(starts), "".join(one.stderr for one in done)
        said = sorted(line for one in done for line in one.stdout.splitlines())
        assert said[-3:-1] == [f"rank {rank} of 2 joined, on cpu" for rank in range(2)]
        assert re.fullmatch(LAST_LINE, said[-1])
        found[form] = weights(folder / "out")
        if (folder / "second" / "snapshot.pt").exists():
            found["second"] = weights(folder / "second")
    return found


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the port is not kept")
def test_the_port_of_spawned_ranks_comes_to_nobody_else_and_the_store_can_listen_there() -> None:
    with kept_port() as port:
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.1", port))
        with socket.socket() as store:
            store.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as torch does
            store.bind(("", port))
            store.listen()
            assert harness.listening(port)


def apart(one: dict[str, Any], other: dict[str, Any]) -> float:
    return max((one[name] - other[name]).abs().max().item() for name in one)


@pytest.mark.parametrize("form", ["tcp", "file", "spawn"])
def test_the_way_in_which_ranks_meet_does_not_change_a_bit(
    form: str, meetings: dict[str, dict[str, Any]]
) -> None:
    assert all(torch.equal(meetings[form][name], value) for name, value in meetings["env"].items())


def test_ranks_started_by_hand_train_as_one_process_does(
    meetings: dict[str, dict[str, Any]], alone: dict[str, Any]
) -> None:
    assert apart(meetings["env"], alone) < 1e-6


def test_rank_0_alone_writes_where_nothing_else_is_asked_for(meetings: dict[str, dict[str, Any]]) -> None:
    assert sorted(meetings) == ["env", "file", "spawn", "tcp"]


def test_nodes_with_different_numbers_of_ranks_train_as_one_process_does(
    tmp_path: Path, alone: dict[str, Any]
) -> None:
    own = ["-m", "torch.distributed.run", "--nnodes=2", "--rdzv-id=mixed", "--rdzv-backend=c10d"]
    own += [f"--rdzv-endpoint=127.0.0.1:{harness.free_port()}", "--local-addr=127.0.0.1"]
    argv = [MAIN, *TINY, *QUIET, "--out", tmp_path / "out"]
    done = harness.by_hand([([*own, f"--nproc-per-node={ranks}", *argv], {}) for ranks in (2, 1)])
    assert [one.returncode for one in done] == [0, 0], done[0].stderr + done[1].stderr
    said = "".join(one.stdout for one in done)
    assert all(f"rank {rank} of 3 joined" in said for rank in range(3))
    assert apart(weights(tmp_path / "out"), alone) < 1e-6


def test_the_toy_regression_learns_its_rule(tmp_path: Path) -> None:
    done = harness.python(MAIN, "--dataset", "toy", *QUIET, "--epochs", 3, "--out", tmp_path)
    assert done.returncode == 0, done.stderr
    losses = [line["test_loss"] for line in lines(tmp_path) if line["kind"] == "epoch"]
    assert losses[2] < losses[1] < losses[0]
    end = status(tmp_path)
    assert end["test_loss"] == losses[2]
    assert not [name for name in end if "accuracy" in name]  # of numbers there is none
    assert re.fullmatch(r"test loss \d+\.\d{6} after 3 epochs, \d+\.\d s", done.stdout.splitlines()[-1])


def test_a_rank_that_exits_on_purpose_is_resumed_to_the_very_same_weights(
    zygote: harness.Zygote, tmp_path: Path, alone: dict[str, Any]
) -> None:
    argv = [*TINY, *QUIET, "--out", tmp_path, "--save-every", 2]
    broken = harness.python(MAIN, *argv, "--fail-rank", 0, "--fail-code", 7, "--fail-step", 8)
    assert broken.returncode == 7
    assert status(tmp_path)["state"] == "running"
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "epoch", "step": 10, "epoch": 2}\n')  # a step that no snapshot holds
        file.write('{"kind": "epoch", "st')  # what a kill in the middle of a write leaves

    resumed = harness.python(MAIN, *argv, "--fail-rank", 0, "--fail-code", 7, "--fail-step", 8)
    assert resumed.returncode == 0, resumed.stderr
    assert resumed.stdout.startswith("resumed at step 6 (epoch 1)")
    found = weights(tmp_path)
    assert all(torch.equal(found[name], alone[name]) for name in alone)
    assert [line["step"] for line in lines(tmp_path) if line["kind"] == "epoch"] == [5, 10, 15]

    again = harness.python(MAIN, *argv)
    assert again.returncode == 0
    said, last = again.stdout.splitlines()
    assert said.endswith("its last: nothing is left to train; --fresh starts again")
    assert re.fullmatch(LAST_LINE, last)
    assert all(torch.equal(weights(tmp_path)[name], alone[name]) for name in alone)

    other = harness.python(MAIN, *argv, "--seed", 3)
    assert other.returncode == 2
    assert "seed 0 (now 3)" in other.stderr
    assert "Traceback" not in other.stderr

    # So small a rate leaves the weights as the seed has made them.
    fresh = harness.python(MAIN, *argv, "--seed", 3, "--fresh", "--lr", "1e-30")
    assert fresh.returncode == 0, fresh.stderr
    found = weights(tmp_path)
    first = models.build("small", shape=(3, 8, 8), classes=10, seed=3).state_dict()
    assert all(torch.equal(found[name], first[name]) for name in first)

    assert status(tmp_path)["state"] == "finished"
    crashed = zygote.start(*argv, "--seed", 4, "--fresh", "--fail-rank", 0)
    assert crashed.wait() == 1
    assert (status(tmp_path)["state"], status(tmp_path)["step"]) == ("running", 0)


def test_worker_processes_for_loading_change_nothing(tmp_path: Path, alone: dict[str, Any]) -> None:
    done = harness.python(MAIN, *TINY, *QUIET, "--workers", 1, "--out", tmp_path)
    assert done.returncode == 0, done.stderr
    assert all(torch.equal(weights(tmp_path)[name], alone[name]) for name in alone)


def test_resnet18_trains_on_stl10_files_in_mixed_precision(tmp_path: Path) -> None:
    pytest.importorskip("torchvision")
    write_stl10(tmp_path, samples=6)
    flags = ["--dataset", "stl10", "--data", tmp_path, "--image-size", 32, "--batch-size", 3, "--amp", "bf16"]
    flags += ["--print-steps", "--log-every", 1, "--deterministic"]
    done = harness.python(MAIN, *flags, *QUIET, "--epochs", 1, "--out", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    steps = [line for line in done.stdout.splitlines() if line.startswith("Epoch: ")]
    assert [line.split("\t")[0] for line in steps] == ["Epoch: [1][1/2]", "Epoch: [1][2/2]"]
    figure = r"\d+\.\d+ \(\d+\.\d+\)"
    names = ("Time", "Data", "Loss", "Prec@1", "Prec@5")
    assert re.fullmatch("\t".join([r"Epoch: \S+", *(f"{name} {figure}" for name in names)]), steps[1])
    assert re.fullmatch(LAST_LINE, done.stdout.splitlines()[-1])
    assert weights(tmp_path / "out")["fc.weight"].shape == (10, 512)


def test_local_rank_0_of_every_node_writes_when_asked_to(tmp_path: Path) -> None:
    normed = [
        "--model",
        "mnist",
        "--image-size",
        12,
    ]  # BatchNorm's statistics differ between ranks if left alone
    port = harness.free_port()
    shared = {"WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    argv = [MAIN, *TINY, *QUIET, *normed, "--snapshot-per-node", "--save-every", 4]
    starts = [
        (
            [*argv, "--out", tmp_path / f"node{node}"],
            {"RANK": node, "LOCAL_RANK": 0, **shared},
        )
        for node in range(2)
    ]
    done = harness.by_hand(starts)
    assert [one.returncode for one in done] == [0, 0], done[0].stderr + done[1].stderr
    for name, step in (("snapshot.prev.pt", 12), ("snapshot.pt", 15)):  # in mid-epoch, and after a validation
        one, other = (torch.load(tmp_path / f"node{node}" / name, weights_only=True) for node in range(2))
        assert (one["step"], other["step"]) == (step, step)
        assert all(torch.equal(one["model"][key], other["model"][key]) for key in one["model"])
    assert not (tmp_path / "node1" / "metrics.jsonl").exists()


def test_missing_data_ends_every_rank_with_exit_code_2_and_a_sentence(tmp_path: Path) -> None:
    pytest.importorskip("torchvision")
    done = harness.by_hand(by_env(2, "--dataset", "mnist", "--data", tmp_path, "--out", tmp_path / "out"))
    assert [one.returncode for one in done] == [2, 2]
    assert "train: rank 0: the data cannot be read" in done[0].stderr
    assert done[1].stderr == "train: rank 1: stopped, because another rank could not load the data\n"
    assert "Traceback" not in done[0].stderr


# Stands for torchvision: copies what it is to fetch, and takes its time, so that another rank could begin as well.
DOWNLOAD = """
import os, shutil, sys, time
class MNIST:
    def __init__(self, folder, download):
        print("rank", os.environ["RANK"], "fetches", flush=True)
        time.sleep(1)
        shutil.copytree(os.environ["SOURCE"], folder, dirs_exist_ok=True)
"""


def test_local_rank_0_alone_fetches_and_the_others_find_what_it_has_fetched(tmp_path: Path) -> None:
    write_mnist(tmp_path / "source", samples=4)
    package = tmp_path / "path" / "torchvision"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "datasets.py").write_text(DOWNLOAD)
    flags = ["--dataset", "mnist", "--data", tmp_path / "data", "--out", tmp_path / "out", *QUIET]
    starts = by_env(2, *flags, "--download", "--epochs", 1)
    extra = {"PYTHONPATH": tmp_path / "path", "SOURCE": tmp_path / "source"}
    done = harness.by_hand([(argv, {**env, **extra}) for argv, env in starts])
    assert [one.returncode for one in done] == [0, 0], done[0].stderr + done[1].stderr
    fetched = [line for one in done for line in one.stdout.splitlines() if line.endswith("fetches")]
    assert fetched == ["rank 0 fetches"]


# What scripts that import `train`, those that catch its errors, and those that call `main` rely on.
IMPORTS = """
import multiprocessing, os, pkgutil, importlib, signal, sys, train
before = signal.getsignal(signal.SIGTERM)
for module in pkgutil.iter_modules(train.__path__, "train."):
    importlib.import_module(module.name)
assert multiprocessing.get_start_method(allow_none=True) is None
assert signal.getsignal(signal.SIGTERM) is before

import torch.distributed
from train import config, dist
try:
    with dist.join(config.make(parallel="fsdp"), dist.Place()):
        assert torch.distributed.is_initialized()
        raise KeyError("anything")
except KeyError:
    assert not torch.distributed.is_initialized()

from train.main import main
flags = ["--dataset", "synthetic", "--synthetic-size=8", "--epochs=1", "--no-tensorboard", "--out", sys.argv[1]]
assert main(flags) == 0
assert torch.get_float32_matmul_precision() == "high" and torch.backends.cudnn.allow_tf32
assert torch.backends.cudnn.benchmark and not torch.are_deterministic_algorithms_enabled()
assert main([*flags, "--fresh", "--deterministic", "--no-tf32"]) == 0
assert torch.get_float32_matmul_precision() == "highest" and not torch.backends.cudnn.allow_tf32
assert torch.are_deterministic_algorithms_enabled() and not torch.backends.cudnn.benchmark
assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
"""


def test_importing_sets_nothing_for_the_process_and_a_run_only_what_its_flags_say(tmp_path: Path) -> None:
    done = harness.python("-c", IMPORTS, tmp_path)
    assert done.returncode == 0, done.stderr


def test_a_loss_that_explodes_stops_with_a_sentence_and_a_failed_status(tmp_path: Path) -> None:
    done = harness.python(MAIN, *TINY, *QUIET, "--lr", "1e30", "--out", tmp_path)
    assert done.returncode == 1
    assert re.search(r"step \d+, rank 0: the (loss|gradients)", done.stderr)
    assert "Traceback" not in done.stderr
    assert status(tmp_path)["state"] == "failed"


@pytest.mark.parametrize(
    ("argv", "env", "told"),
    [
        (["--device", "cuda"], {}, "sees no GPU"),
        (["--init-method", "tcp://127.0.0.1:1"], {}, "RANK LOCAL_RANK"),
        (["0", "0"], {"WORLD_SIZE": 2}, "MASTER_ADDR and MASTER_PORT"),
        (["2", "0"], {"WORLD_SIZE": 2}, "not in 0..1"),
        ([], {"RANK": 0}, "WORLD_SIZE"),
        (["--init-method", "tcp://nohost:99999", "--world-size", 2, 0, 0], {}, "cannot meet there (Port out"),
        (["--init-method", "file:///no/such", "--world-size", 2, 0, 0], {}, "there is no such folder"),
        (["--resume", "require", "--out", "nowhere"], {}, "no rank has a valid snapshot"),
        (["--spawn", "2"], {"TORCHELASTIC_RUN_ID": "job"}, "leave one of them out"),
    ],
)
def test_a_start_that_cannot_work_is_refused_with_what_to_do(
    argv: list[object], env: dict[str, object], told: str, tmp_path: Path
) -> None:
    done = harness.python(MAIN, *TINY, *QUIET, *argv, cwd=tmp_path, **env)
    assert done.returncode == 2, done.stderr
    assert told in done.stderr
    assert "Traceback" not in done.stderr


def test_a_port_that_is_taken_is_told_from_ranks_that_do_not_come(
    zygote: harness.Zygote, tmp_path: Path
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        run = zygote.start(*TINY, "--init-method", address, "--world-size", 2, "--timeout", 5, 0, 0)
        assert run.wait() == 1
    assert run.stderr.splitlines()[-1].endswith("End it, or give all of them another one")
    assert "Traceback" not in run.stderr


def test_a_batch_too_small_for_the_ranks_trains_and_is_told(zygote: harness.Zygote, tmp_path: Path) -> None:
    ranks = zygote.ranks(2, *TINY, *QUIET, "--batch-size", 1, "--epochs", 1, "--out", tmp_path)
    assert [rank.wait() for rank in ranks] == [0, 0], ranks[0].stderr
    told = "--batch-size 1 is that of all 2 ranks together: in each step some of them have nothing to do"
    assert ranks[0].stdout.splitlines()[1] == told
    assert told not in ranks[1].stdout


def test_a_memory_that_is_too_small_ends_a_run_with_a_sentence(tmp_path: Path) -> None:
    done = harness.python(MAIN, *TINY, *QUIET, "--synthetic-size", 10**13, "--out", tmp_path)
    assert done.returncode == 1
    assert "out of memory" in done.stderr
    assert "give a smaller --batch-size" in done.stderr
    assert "Traceback" not in done.stderr


def test_an_output_file_that_cannot_be_replaced_ends_a_run_with_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "status.json").mkdir()
    done = harness.python(MAIN, *TINY, *QUIET, "--out", tmp_path)
    assert done.returncode == 1
    assert "give another --out" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_second_run_in_the_same_folder_is_refused_while_the_first_one_goes_on(tmp_path: Path) -> None:
    argv = [MAIN, *TINY, *QUIET, "--out", tmp_path / "out"]
    first = harness.start([*argv, "--epochs", 100_000], cwd=tmp_path)
    try:
        harness.until((tmp_path / "out" / "status.json").exists, "the first run has begun")
        second = harness.python(*argv)
    finally:
        harness.kill_session(first)
    assert second.returncode == 2
    assert "another run writes to this folder" in second.stderr
    assert "Traceback" not in second.stderr
    after = harness.python(*argv)
    assert after.returncode == 0, after.stderr  # what was killed leaves no lock behind


ENDS = """
import gc, sys
from torch.nn.parallel import DistributedDataParallel
from train import main, trainer
if sys.argv[1] == "bug":
    trainer.Trainer.fit = lambda self: 1 / 0
code = main.main(sys.argv[2:])
gc.collect()
print("kept", sum(isinstance(one, DistributedDataParallel) for one in gc.get_objects()))
main.leave(code)
"""


@pytest.mark.parametrize(("how", "lr", "code"), [("well", 0.1, 0), ("badly", 1e30, 1), ("bug", 0.1, 1)])
def test_a_model_is_freed_by_the_end_of_the_process_alone(
    how: str, lr: float, code: int, tmp_path: Path
) -> None:
    # torch 2.11 frees it with the interpreter's lock held, and waits for a thread of gloo's that may want the lock.
    place = {"RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": harness.free_port()}
    done = harness.python("-c", ENDS, how, *TINY, *QUIET, "--lr", lr, "--out", tmp_path, **place)
    assert (done.returncode, done.stdout.splitlines()[-1]) == (code, "kept 1"), done.stderr
    assert ("ZeroDivisionError" in done.stderr) is (how == "bug")
