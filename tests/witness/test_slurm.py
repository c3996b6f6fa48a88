"""`cloudddp export slurm` with a real Slurm: munge, slurmctld and two slurmd, each on a host of its own, 2 x
2 ranks on gloo."""

from __future__ import annotations

import contextlib
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support import slurmlab
from support.harness import ROOT, clean_environment, wait_for
from support.slurmlab import HEAD, SlurmLab

WAITING = """\
import os, pathlib, signal, sys, time
def save(*_):
    print("saving", os.environ["RANK"], flush=True)
    time.sleep(1)
    sys.exit(143)
signal.signal(signal.SIGTERM, save)
print("waiting", os.environ["RANK"], flush=True)
failing = pathlib.Path("fail-on-" + os.environ["SLURMD_NODENAME"])
while os.environ.get("SLURM_RESTART_COUNT", "0") == "0":
    time.sleep(0.1)
    if failing.exists():
        sys.exit(1)
"""
# Rank 2 fails. The others end later, with a code that is higher: srun would return that one.
FAILING = """\
import os, pathlib, sys, time
failed = pathlib.Path("rank-2-failed")
if os.environ["RANK"] == "2":
    failed.touch()
    sys.exit(7)
while not failed.exists():
    time.sleep(0.02)
time.sleep(0.5)
os.abort()
"""


def export(lab: SlurmLab, script: str, *words: str) -> str:
    """Write a job script with the command, as a user does; return its name."""
    name = f"{Path(script).stem}-{len(list(lab.project.glob('*.sh')))}.sh"
    options, args = words, ()
    if "--" in words:
        at = words.index("--")
        options, args = words[:at], words[at + 1 :]
    subprocess.run(
        [
            sys.executable,
            "-m",
            "cloudddp",
            "export",
            "slurm",
            "--gpus-per-node",
            str(slurmlab.GPUS),
            *options,
            "-o",
            name,
            script,
            *args,
        ],
        env=lab.env,
        cwd=lab.project,
        check=True,
        capture_output=True,
        timeout=300,
    )
    return name


@contextlib.contextmanager
def new_lab(folder: Path, **settings: Any) -> Iterator[SlurmLab]:
    slurmlab.require()
    home = folder / "home"
    home.mkdir()
    lab = SlurmLab(folder / "slurm", clean_environment(HOME=str(home)), **settings)
    try:
        lab.start()
        shutil.copy(ROOT / "tests" / "support" / "slurm_train.py", lab.project / "train.py")
        (lab.project / "waiting.py").write_text(WAITING)
        (lab.project / "failing.py").write_text(FAILING)
        yield lab
    finally:
        lab.end()


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmLab]:
    with new_lab(tmp_path_factory.mktemp("lab")) as found:
        yield found


@pytest.fixture(scope="module")
def by_hand(lab: SlurmLab) -> Any:
    """The weights after torchrun was started by hand on both nodes, without Slurm and without cloudddp."""
    running = [
        lab.open(
            name,
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--nnodes=2",
            "--nproc-per-node=2",
            f"--node-rank={rank}",
            f"--master-addr={lab.hosts['n0'].address}",
            "--master-port=29400",
            "train.py",
            "--out",
            "by-hand.pt",
            GLOO_SOCKET_IFNAME=interface,
        )
        for rank, (name, interface) in enumerate(slurmlab.NODES.items())
    ]
    for process in running:
        output, _ = process.communicate(timeout=300)
        assert process.returncode == 0, output
    return weights(lab, "by-hand.pt")


def weights(lab: SlurmLab, name: str) -> Any:
    torch = pytest.importorskip("torch")
    return torch.load(lab.project / name)["model"]


def assert_equal(found: Any, expected: Any) -> None:
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        assert (found[name] - values).abs().max() <= 1e-12, name
        assert values.abs().max() > 1e-3  # it has been trained


def test_weights_equal_those_of_torchrun_by_hand(lab: SlurmLab, by_hand: Any) -> None:
    job = lab.submit(export(lab, "train.py", "--", "--out", "slurm.pt"))
    facts = lab.wait_for_end(job)
    output = lab.output(job)
    assert (facts["JobState"], facts["ExitCode"], facts["Restarts"]) == ("COMPLETED", "0:0", "0"), output
    assert "begin at step 0 of 12, 4 ranks" in output
    for name, interface in slurmlab.NODES.items():
        assert f"{lab.hosts[name].address} on {interface}, ranks: 2" in output
    assert_equal(weights(lab, "slurm.pt"), by_hand)
    assert list(lab.project.glob("*.state")) == []


def test_exit_code_is_that_of_the_rank_that_failed_first(lab: SlurmLab) -> None:
    job = lab.submit(export(lab, "failing.py"))
    facts = lab.wait_for_end(job)
    output = lab.output(job)
    assert (facts["JobState"], facts["ExitCode"], facts["Restarts"]) == ("FAILED", "7:0", "0"), output
    assert "rank 2 failed first, with exit code 7" in output


def test_cancelled_job_is_not_requeued(lab: SlurmLab) -> None:
    job = lab.submit(export(lab, "waiting.py"))
    wait_for(lambda: lab.output(job).count("waiting") == 4, "4 ranks wait")
    lab.on(HEAD, "scancel", job)
    wait_for(lambda: lab.on(HEAD, "squeue", "--noheader").stdout == "", "the job has left the queue")
    facts = lab.facts(job)
    assert (facts["JobState"], facts["Restarts"]) == ("CANCELLED", "0"), lab.output(job)
    assert "requeue" not in lab.output(job)


def test_job_resumes_after_a_killed_node(lab: SlurmLab, by_hand: Any) -> None:
    job = lab.submit(export(lab, "train.py", "--", "--out", "killed.pt", "--hold", "6"))
    wait_for(lambda: lab.output(job).count("holds") == 4, "4 ranks hold")
    lab.power_off("n1")
    wait_for(lambda: lab.facts(job)["JobState"] != "RUNNING", "Slurm has noticed the lost node")
    lab.boot("n1")
    facts = lab.wait_for_end(job)
    output = lab.output(job)
    assert (facts["JobState"], facts["Restarts"]) == ("COMPLETED", "1"), output
    assert "begin at step 6 of 12" in output
    assert_equal(weights(lab, "killed.pt"), by_hand)


def test_job_resumes_after_its_time_limit(lab: SlurmLab, by_hand: Any) -> None:
    """With the signal that Slurm sends before the limit, which it counts in minutes."""
    job = lab.submit(export(lab, "train.py", "--", "--out", "limited.pt", "--hold", "4"))
    wait_for(lambda: lab.output(job).count("holds") == 4, "4 ranks hold")
    lab.on(HEAD, "scancel", "--batch", "--signal=USR1", job)
    facts = lab.wait_for_end(job, 180)
    output = lab.output(job)
    assert (facts["JobState"], facts["Restarts"]) == ("COMPLETED", "1"), output
    # Once per rank. A rank may stop with the others before its own signal comes.
    assert sorted(re.findall(r"rank (\d): [01] x SIGTERM, saved at step 4", output)) == ["0", "1", "2", "3"]
    assert "requeue 1 of at most 10" in output
    assert "begin at step 4 of 12" in output
    assert_equal(weights(lab, "limited.pt"), by_hand)
