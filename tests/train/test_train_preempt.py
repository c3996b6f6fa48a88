"""What stops a run from outside: SIGTERM to all, to one rank, or at a bad moment; a peer that dies; a full disk; Ctrl-C.

Every end is one sentence from our ranks, an exit code, and a status; never a traceback, never a hang.
"""

from __future__ import annotations

import json
import os
import random
import re
import resource
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import train_harness as harness

pytest.importorskip("torch")

import torch
from test_train_snapshot import stop_in_the_middle_of_a_write

from train import snapshot
from train.peers import GRACE

pytestmark = [pytest.mark.torch, pytest.mark.xdist_group("train_preempt")]  # one worker runs the jobs
MAIN = harness.ROOT / "train" / "main.py"
fillable = pytest.mark.skipif(not hasattr(resource, "prlimit"), reason="needs Linux")
STOPPED = r"train: rank 0: told to stop: stopped after step {step} with a snapshot in {folder}; the same command goes on from there"


def flags(*more: object, samples: int = 960, batch: int = 8, model: str = "mnist") -> list[object]:
    """A run of 120 steps per epoch with BatchNorm in its network, where nothing else is asked for."""
    data = ["--dataset", "synthetic", "--synthetic-size", samples, "--image-size", 12, "--batch-size", batch]
    return [*data, "--model", model, "--epochs", 2, "--no-tensorboard", "--log-every", 1, *more]


def status(folder: Path) -> dict[str, Any]:
    try:
        return json.loads((folder / "status.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {"state": "nothing", "step": 0}


def in_mid_epoch(folder: Path) -> None:
    harness.until(lambda: status(folder)["step"] > 5, f"a step in {folder}")


def epochs(folder: Path) -> list[int]:
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [line["epoch"] for line in map(json.loads, lines) if line["kind"] == "epoch"]


def same_weights(one: Path, other: Path) -> bool:
    a, b = (torch.load(folder / snapshot.NAME, weights_only=True)["model"] for folder in (one, other))
    return all(torch.equal(a[name], b[name]) for name in a)


@pytest.fixture(scope="module")
def whole(zygote: harness.Zygote, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of two ranks that nobody stopped."""
    folder = tmp_path_factory.mktemp("whole")
    ranks = zygote.ranks(2, *flags("--out", folder))
    assert [rank.wait() for rank in ranks] == [0, 0], ranks[0].stderr
    return folder


def resumes_to(whole: Path, folder: Path, zygote: harness.Zygote) -> None:
    ranks = zygote.ranks(2, *flags("--out", folder))
    assert [rank.wait() for rank in ranks] == [0, 0], ranks[0].stderr
    assert same_weights(whole, folder)
    assert epochs(folder) == [1, 2]


def test_sigterm_to_torchrun_stops_every_rank_at_one_step_although_workers_get_it_too(
    zygote: harness.Zygote, tmp_path: Path, whole: Path
) -> None:
    own = ["-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1", "--nproc-per-node=2"]
    job = harness.start([*own, MAIN, *flags("--workers", 2, "--out", tmp_path)], cwd=harness.ROOT)
    try:
        in_mid_epoch(tmp_path)
        job.send_signal(signal.SIGTERM)
    finally:
        done = harness.finish(job)
    told = status(tmp_path)
    assert told["state"] == "preempted"
    assert 5 < told["step"] < 240
    sentence = STOPPED.format(step=told["step"], folder=tmp_path)
    assert [line for line in done.stderr.splitlines() if line.startswith("train:")] == [sentence]
    assert "DataLoader worker" not in done.stderr
    assert 'File "' not in done.stderr.partition("train: rank 0")[0]
    assert torch.load(tmp_path / snapshot.NAME, weights_only=True)["step"] == told["step"]
    resumes_to(whole, tmp_path, zygote)


def test_sigterm_to_one_rank_stops_all_however_often_it_is_repeated(
    zygote: harness.Zygote, tmp_path: Path, whole: Path
) -> None:
    ranks = zygote.ranks(2, *flags("--out", tmp_path))
    in_mid_epoch(tmp_path)
    while not all(rank.ended() for rank in ranks):
        ranks[1].signal(signal.SIGTERM)
        if status(tmp_path)["state"] == "preempted":  # as torchrun does when the first rank has ended
            ranks[0].signal(signal.SIGTERM)
    assert [rank.wait() for rank in ranks] == [143, 143], ranks[0].stderr + ranks[1].stderr
    told = status(tmp_path)
    assert told["state"] == "preempted"
    assert ranks[0].stderr == STOPPED.format(step=told["step"], folder=tmp_path) + "\n"
    assert ranks[1].stderr == ""
    resumes_to(whole, tmp_path, zygote)


def test_a_writer_that_is_told_again_and_again_while_it_saves_saves_all_the_same(
    zygote: harness.Zygote, tmp_path: Path
) -> None:
    run = zygote.start(*flags("--image-size", 64, "--out", tmp_path))
    in_mid_epoch(tmp_path)
    while not run.ended():
        run.signal(signal.SIGTERM)
        time.sleep(0.0002)
    assert run.wait() == 143
    assert run.stderr == STOPPED.format(step=status(tmp_path)["step"], folder=tmp_path) + "\n"
    state = snapshot.load_local(tmp_path)
    assert state is not None
    assert state["step"] == status(tmp_path)["step"]


def test_sigterm_within_validation_stops_there_and_the_epoch_is_validated_and_told_once_on_resumption(
    zygote: harness.Zygote, tmp_path: Path
) -> None:
    """2 steps of training, and 10,000 samples to validate in batches of 256."""
    own = flags("--image-size", 4, "--epochs", 1, samples=40_000, batch=20_000, model="small")
    whole = zygote.start(*own, "--out", tmp_path / "whole")
    folder = tmp_path / "stopped"
    run = zygote.start(*own, "--out", folder, "--signs", tmp_path, run="validation_checks")
    harness.until((tmp_path / "validates").exists, "the first samples are validated")
    run.signal(signal.SIGTERM)
    (tmp_path / "go").touch()
    assert run.wait() == 143, run.stdout + run.stderr
    assert (status(folder)["state"], status(folder)["step"]) == ("preempted", 2)
    assert epochs(folder) == []
    with (folder / "metrics.jsonl").open("a") as file:
        # What a resumed run leaves that is killed between this line and its snapshot.
        file.write('{"kind": "epoch", "step": 2, "epoch": 1}\n')
    again = zygote.start(*own, "--out", folder)
    assert (whole.wait(), again.wait()) == (0, 0), whole.stderr + again.stderr
    assert epochs(folder) == [1]
    assert same_weights(tmp_path / "whole", folder)


def test_sigterm_while_a_run_starts_ends_it_without_a_traceback(
    zygote: harness.Zygote, tmp_path: Path
) -> None:
    seed = random.randrange(2**32)
    chance = random.Random(seed)
    for number in range(6):
        run = zygote.start(*flags("--out", tmp_path / f"{number}", samples=40_000))
        time.sleep(chance.uniform(0, 0.3))
        run.signal(signal.SIGTERM)
        assert run.wait() in (143, -signal.SIGTERM), f"seed {seed}: {run.stderr}"
        assert run.stderr == "" or run.stderr.startswith("train: rank 0: told to stop"), f"seed {seed}"
        assert "Traceback" not in run.stderr


# Stands before torch: says that the import has begun, and takes its time.
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
# What a shell starts in the background ignores SIGINT, these tests included.
HEEDED = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); "


def importing(folder: Path, code: str, *, slow: str, seen: int) -> subprocess.Popen[str]:
    """`python -c CODE` once the processes in which torch is imported are `seen`; it never ends in the one named `slow`."""
    (folder / "torch").mkdir()
    (folder / "torch" / "__init__.py").write_text(SLOW_IMPORT)
    path = f"{folder}{os.pathsep}{harness.ROOT}"
    job = harness.start(["-c", HEEDED + code], cwd=harness.ROOT, PYTHONPATH=path, SEEN=folder, SLOW=slow)
    try:
        harness.until(lambda: len([*folder.glob("*Process*")]) == seen or job.poll(), "torch is imported")
    except AssertionError:
        harness.kill_session(job)
        raise
    return job


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_torch_is_imported_ends_a_process_without_a_word(
    number: signal.Signals, tmp_path: Path
) -> None:
    code = f"import runpy, sys; sys.argv = ['main.py']; runpy.run_path({str(MAIN)!r}, run_name='__main__')"
    job = importing(tmp_path, code, slow="MainProcess", seen=1)
    job.send_signal(number)
    done = harness.finish(job)
    assert (done.returncode, done.stderr) == (-number, "")


def test_an_interrupt_of_the_parent_alone_ends_spawned_ranks_that_import_torch_without_a_word(
    tmp_path: Path,
) -> None:
    argv = [str(word) for word in flags("--spawn", 2, "--epochs", 10_000, "--out", tmp_path / "out")]
    code = f"from train import main, spawn; spawn.PATIENCE = 0; main.leave(main.main({argv!r}))"
    job = importing(tmp_path, code, slow="", seen=3)
    job.send_signal(signal.SIGINT)
    done = harness.finish(job)  # not before the ranks have closed their ends of its pipes
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_a_rank_that_still_waits_for_the_others(
    zygote: harness.Zygote, number: signal.Signals, tmp_path: Path
) -> None:
    port = harness.free_port()
    shared = {"WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    run = zygote.start(*flags("--out", tmp_path), RANK=0, LOCAL_RANK=0, **shared)
    harness.until(lambda: harness.listening(port), "rank 0 waits")
    run.signal(number)
    assert run.wait() == -number
    assert run.stderr == ""


def test_ranks_that_never_all_come_end_with_a_sentence(zygote: harness.Zygote, tmp_path: Path) -> None:
    shared = {"WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": harness.free_port()}
    run = zygote.start(*flags("--timeout", 1, "--out", tmp_path), RANK=0, LOCAL_RANK=0, **shared)
    assert run.wait() == 1
    assert "train: rank 0: the 2 ranks could not meet (" in run.stderr
    assert "Traceback" not in run.stderr


def test_sigterm_to_the_parent_of_spawned_ranks_reaches_them(tmp_path: Path) -> None:
    job = harness.start([MAIN, *flags("--spawn", 2, "--epochs", 9, "--out", tmp_path)], cwd=harness.ROOT)
    try:
        in_mid_epoch(tmp_path)
        os.kill(job.pid, signal.SIGTERM)
    finally:
        done = harness.finish(job)
    assert done.returncode == 143, done.stderr
    told = status(tmp_path)
    assert told["state"] == "preempted"
    assert done.stderr == STOPPED.format(step=told["step"], folder=tmp_path) + "\n"


@pytest.mark.parametrize(("world", "victim"), [(2, 1), (3, 2)])
def test_ranks_that_lose_another_end_with_a_sentence_and_a_failed_status(
    zygote: harness.Zygote, tmp_path: Path, world: int, victim: int
) -> None:
    ranks = zygote.ranks(world, *flags("--save-every", 4, "--out", tmp_path))
    in_mid_epoch(tmp_path)
    ranks[victim].signal(signal.SIGKILL)
    for number, rank in enumerate(ranks):
        assert rank.wait() == (-signal.SIGKILL if number == victim else 1)
        if number == victim:
            continue
        kept = torch.load(tmp_path / snapshot.NAME, weights_only=True)["step"]
        (line,) = rank.stderr.splitlines()
        step = int(line.removeprefix(f"train: rank {number}: after step ").partition(":")[0])
        assert step >= kept
        assert f"after step {step}: the connection to the other ranks is lost (" in line
        assert kept in promised(line)
    assert status(tmp_path)["state"] == "failed"
    assert "the connection to the other ranks is lost" in status(tmp_path)["error"]


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads /proc")
@pytest.mark.parametrize("sender", [0, 1])
def test_rank_ends_when_another_is_killed_in_the_middle_of_a_transfer(
    zygote: harness.Zygote, tmp_path: Path, sender: int
) -> None:
    """gloo wakes up nobody who waits for such a transfer: only --timeout (600 s) would end it."""
    own = ["--at", 6, "--sender", sender, "--signs", tmp_path]
    ranks = zygote.ranks(2, *own, *flags("--save-every", 4, "--out", tmp_path / "out"), run="peer_checks")
    receiver = ranks[1 - sender]
    harness.until(lambda: stopped(receiver.pid), "the receiver is stopped")
    (tmp_path / "stopped").touch()
    harness.until((tmp_path / "sent").exists, "half a tensor is on its way")
    ranks[1].signal(signal.SIGKILL)
    assert ranks[1].wait() == -signal.SIGKILL
    ranks[0].signal(signal.SIGCONT)
    assert ranks[0].wait() == 1
    (line,) = ranks[0].stderr.splitlines()
    assert line.startswith("train: rank 0: after step 5: the connection to the other ranks is lost (")
    assert promised(line) == [4]
    told = status(tmp_path / "out")
    assert (told["state"], told["step"]) == ("failed", 5)
    assert told["error"].startswith("after step 5: the connection to the other ranks is lost (")


def test_rank_that_writes_a_snapshot_is_not_ended_when_another_is_killed(
    zygote: harness.Zygote, tmp_path: Path
) -> None:
    ranks = zygote.ranks(2, *flags("--save-every", 4, "--epochs", 9, "--out", tmp_path))
    in_mid_epoch(tmp_path)
    pipe = tmp_path / snapshot.TEMPORARY.format(0)
    harness.until(lambda: made_pipe(pipe), "no snapshot is being written")
    with pipe.open("rb") as file:  # returns once the rank has opened it, too
        assert file.read(1)
        ranks[1].signal(signal.SIGKILL)
        assert ranks[1].wait() == -signal.SIGKILL
        time.sleep(2 * GRACE)  # time enough to be wrong in
        assert not ranks[0].ended()
        file.read()
    assert ranks[0].wait() == 1
    assert "the connection to the other ranks is lost (" in ranks[0].stderr


def made_pipe(path: Path) -> bool:
    """Make a named pipe, unless a file is there."""
    try:
        os.mkfifo(path)
    except FileExistsError:
        return False
    return True


def stopped(pid: int) -> bool:
    """Whether SIGSTOP has stopped the process."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


def promised(line: str) -> list[int]:
    """From which steps the same command is said to go on."""
    other = r"(?:, or from that of step (\d+) if it is finished)?"
    found = re.search(rf"\); the same command goes on from the snapshot of step (\d+){other}$", line)
    assert found, line
    return [int(step) for step in found.groups() if step]


def test_a_rank_that_loses_another_while_it_saves_promises_no_older_snapshot_than_there_is(
    zygote: harness.Zygote, tmp_path: Path
) -> None:
    ranks = zygote.ranks(2, *flags("--save-every", 4, "--epochs", 9, "--out", tmp_path))
    stop_in_the_middle_of_a_write(tmp_path, ranks[0].pid)
    ranks[1].kill_session()
    assert ranks[1].wait() == -signal.SIGKILL
    ranks[0].signal(signal.SIGCONT)
    assert ranks[0].wait() == 1
    kept = torch.load(tmp_path / snapshot.NAME, weights_only=True)["step"]
    (line,) = ranks[0].stderr.splitlines()
    assert promised(line)[-1] == kept


@fillable
def test_a_disk_that_is_full_on_one_rank_stops_all_and_the_old_snapshot_loads(
    zygote: harness.Zygote, tmp_path: Path
) -> None:
    first = zygote.ranks(2, *flags("--epochs", 1, "--out", tmp_path))
    assert [rank.wait() for rank in first] == [0, 0]
    before = (tmp_path / snapshot.NAME).read_bytes()
    ranks = zygote.ranks(2, *flags("--out", tmp_path))
    full_from_now_on(ranks[0], 100_000)  # more than the lines of two epochs take, less than a snapshot
    assert [rank.wait() for rank in ranks] == [1, 1], ranks[0].stderr + ranks[1].stderr
    (full,), (other,) = (rank.stderr.splitlines() for rank in ranks)
    assert full.startswith(f"train: rank 0: the snapshot {tmp_path / snapshot.NAME} cannot be written (")
    assert other == "train: rank 1: stopped, because another rank could not write the snapshot"
    assert status(tmp_path)["state"] == "failed"
    assert (tmp_path / snapshot.NAME).read_bytes() == before
    assert snapshot.load_local(tmp_path) is not None
    assert not list(tmp_path.glob(snapshot.TEMPORARY.format("*")))


@fillable
def test_a_disk_too_full_for_a_line_of_metrics_is_a_sentence(tmp_path: Path) -> None:
    run = harness.start([MAIN, *flags("--epochs", 9, "--out", tmp_path)], cwd=harness.ROOT)
    try:
        in_mid_epoch(tmp_path)
        full_from_now_on(run, 10)
    finally:
        done = harness.finish(run)
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith("train: rank 0: [Errno 27] File too large")
    assert line.endswith(": make room there, or give another --out")


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads /proc")
@pytest.mark.parametrize(("number", "code"), [(signal.SIGKILL, 137), (signal.SIGINT, 130)])
def test_spawned_ranks_end_with_the_code_that_a_shell_would_report(
    zygote: harness.Zygote, tmp_path: Path, number: int, code: int
) -> None:
    job = zygote.start(*flags("--spawn", 1, "--epochs", 99, "--out", tmp_path))
    in_mid_epoch(tmp_path)
    if number == signal.SIGINT:
        os.killpg(job.pid, number)  # as a terminal does
    else:
        os.kill(rank_of(job.pid), number)
    assert job.wait() == code, job.stderr
    assert "Traceback" not in job.stderr


def rank_of(parent: int) -> int:
    """The only rank that `parent` has spawned."""
    children = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
    (rank,) = (pid for pid in children if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes())
    return int(rank)


def full_from_now_on(run: harness.Forked | subprocess.Popen[str], size: int) -> None:
    """No file that `run` writes may grow beyond `size` bytes; a pipe may."""
    resource.prlimit(run.pid, resource.RLIMIT_FSIZE, (size, size))


def test_an_interrupt_from_the_keyboard_is_one_sentence(zygote: harness.Zygote, tmp_path: Path) -> None:
    run = zygote.start(*flags("--out", tmp_path))
    in_mid_epoch(tmp_path)
    run.signal(signal.SIGINT)
    assert run.wait() == 130
    assert (
        run.stderr
        == "train: rank 0: interrupted; the same command goes on from the newest snapshot, if there is one\n"
    )


def test_a_snapshot_of_another_run_is_refused_and_forced_only_where_it_fits(
    zygote: harness.Zygote, tmp_path: Path
) -> None:
    def run(*more: object) -> harness.Forked:
        started = zygote.start(*flags("--out", tmp_path, samples=80), *more)
        started.wait()
        return started

    assert run().code == 0
    differences = {
        ("--seed", 3): "seed 0 (now 3)",
        ("--batch-size", 16): "batch_size 8 (now 16)",
        ("--model", "small"): "model mnist (now small)",
        ("--synthetic-size", 160): "training samples 80 (now 160)",
        ("--optimizer", "adamw"): "optimizer sgd (now adamw)",
        ("--scheduler", "cosine"): "scheduler none (now cosine)",
    }
    for other, said in differences.items():
        refused = run(*other)
        assert refused.code == 2
        sentence = (
            f"train: rank 0: the snapshot in {tmp_path} is of another run: {said}; give another --out, "
        )
        assert refused.stderr.startswith(sentence)
        assert "Traceback" not in refused.stderr
    for other in (("--model", "small"), ("--image-size", 16), ("--optimizer", "adamw")):
        refused = run("--force", *other)
        assert refused.code == 2, (other, refused.stdout, refused.stderr)
        assert refused.stderr.startswith(
            f"train: rank 0: the snapshot in {tmp_path} does not fit this model and "
        )
        assert "Traceback" not in refused.stderr
    forced = run("--force", "--batch-size", 16, "--epochs", 3)
    assert forced.code == 0, forced.stderr
    assert forced.stdout.splitlines()[:2] == [
        f"--force: the snapshot in {tmp_path} is of another run: batch_size 8 (now 16)",
        f"resumed at step 10 (epoch 2) from {tmp_path}",
    ]
    assert (status(tmp_path)["step"], status(tmp_path)["epoch"]) == (15, 3)
    again = run("--batch-size", 16, "--epochs", 3)
    assert again.code == 0, again.stderr
