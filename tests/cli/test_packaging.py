"""The wheel: built, installed into a clean environment outside the checkout, and used from there."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from support.harness import ROOT, clean_environment

from cloudddp.agent import program
from cloudddp.files import EXAMPLES, payload_example

pytestmark = pytest.mark.xdist_group("packaging")
THIS_PYTHON = f"3.{sys.version_info.minor}"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("build", reason="building the wheel needs the extra `dev`")
    out = tmp_path_factory.mktemp("dist")
    subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), str(ROOT)],
        check=True,
        capture_output=True,
    )
    (built,) = out.glob("*.whl")
    return built


def test_wheel_contains_infra_and_the_examples_and_no_generic_names(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    copied = [path for name in EXAMPLES for path in payload_example(name).values()]
    examples = [path.relative_to(ROOT).as_posix() for path in copied]
    assert {"examples/ddp/train.py", "train/main.py"} <= set(examples)
    assert any(name.startswith("train/smddp/smdistributed/") for name in examples)
    agent = [path.relative_to(ROOT).as_posix() for path in (ROOT / "infra/node/agent").rglob("*.py")]
    policies = ["infra/iam/operator.json", "infra/iam/README.md"]
    for needed in (*agent, *policies, "infra/node/cloudddp-deadline.timer", *examples):
        assert f"cloudddp/_payload/{needed}" in names
    assert {name.split("/")[0] for name in names if ".dist-info" not in name} == {"cloudddp"}
    assert not any("__pycache__" in name or "/tests/" in name for name in names)
    assert {
        "cloudddp/py.typed",
        "cloudddp/job/slurm.sh",
        "cloudddp/simulator/iam/ec2_authorization.json",
    } <= set(names)


Cloudddp = Callable[..., "subprocess.CompletedProcess[str]"]


def rehearse(cloudddp: Cloudddp, folder: Path) -> None:
    """Run a job of a script without torch, where torch is not installed."""
    cloudddp("init", "project")
    project = folder / "project"
    (project / "hello.py").write_text("import os; print('hello from', os.environ['RANK'])\n")
    try:
        cloudddp("--sim", "up", "-n", "1", cwd=project)
        ran = cloudddp("--sim", "launch", "hello.py", cwd=project)
        assert "[rank 0 | node 0] hello from 0" in ran.stdout, ran.stderr
        assert "ranks start without torchrun" in ran.stderr
        (project / "hello.py").write_text("import torch\n")
        failed = cloudddp("--sim", "launch", "hello.py", cwd=project, code=1)
        assert "install torch on this computer" in failed.stderr
        down = cloudddp("--sim", "down", "-y", cwd=project)
        assert "nothing is left" in down.stdout, down.stderr
    finally:
        cloudddp("sim", "stop")


def command_in(folder: Path, bin_folder: Path) -> Cloudddp:
    """Return what runs the cloudddp of an environment, without the checkout and its environment, and requires
    an exit code."""
    env = clean_environment(CLOUDDDP_HOME=str(folder / "home"))
    env["PATH"] = f"{bin_folder}:/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin"

    def cloudddp(*words: str, cwd: Path = folder, code: int = 0) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            [str(bin_folder / "cloudddp"), *words],
            cwd=cwd,
            env=env,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == code, done.stderr
        return done

    return cloudddp


def uv(*words: object, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run uv, with the settings of this computer's package index."""
    command = [sys.executable, "-m", "uv", *map(str, words)]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)


def test_wheel_is_run_by_uvx(wheel: Path, tmp_path: Path) -> None:
    pytest.importorskip("uv")
    shown = uv("tool", "run", "--from", wheel, "cloudddp", "--help", cwd=tmp_path)
    assert shown.returncode == 0, shown.stderr
    assert "cloudddp launch train.py" in shown.stdout


@pytest.mark.parametrize("version", sorted({THIS_PYTHON, "3.14"}))
def test_installed_wheel_works_outside_the_checkout(wheel: Path, tmp_path: Path, version: str) -> None:
    """With this version of Python and the newest. Core first (its size is limited), then with the simulator:
    init and a rehearsal from a clean environment."""
    pytest.importorskip("uv")
    found = uv("python", "find", version, "--no-python-downloads", cwd=tmp_path)
    if found.returncode:
        pytest.skip(f"Python {version} is not installed here")
    venv = tmp_path / "venv"
    made = uv("venv", "--python", found.stdout.strip(), venv, cwd=tmp_path)
    assert made.returncode == 0, made.stderr
    python, pins = str(venv / "bin" / "python"), ("-c", ROOT / "constraints.txt")
    if version != THIS_PYTHON:
        pins = ()
    (site,) = (venv / "lib").glob("python3*/site-packages")

    def install(what: str) -> None:
        done = uv("pip", "install", "--python", python, *pins, what, cwd=tmp_path)
        if done.returncode and os.environ.get("CI") != "true":
            pytest.skip(f"no package registry to install from: {done.stderr.strip().splitlines()[-1]}")
        assert done.returncode == 0, done.stderr

    def megabytes() -> float:
        parts = [p for p in site.iterdir() if not p.name.startswith(("pip", "setuptools"))]
        files = [f for p in parts for f in ([p] if p.is_file() else p.rglob("*")) if f.is_file()]
        return sum(f.stat().st_size for f in files if f.suffix != ".pyc") / 1e6

    install(str(wheel))
    assert megabytes() <= 120
    assert not (site / "train").exists()
    assert not (site / "infra").exists()
    cloudddp = command_in(tmp_path, venv / "bin")
    code = "from cloudddp.agent import program; print(program.agent_path())"
    agent = subprocess.run([python, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert agent.stdout.strip() == program.agent_path()  # as built from the checkout

    missing = cloudddp("--sim", "ls", code=1)
    assert "cloudddp[sim]" in missing.stderr
    install(f"{wheel}[sim]")
    code = "import cloudddp.simulator.api.server, moto.server"  # compiled once: the start has a time limit
    subprocess.run([python, "-c", code], cwd=tmp_path, check=True)
    for example in EXAMPLES:
        cloudddp("init", "--example", example, example)
        for name, path in payload_example(example).items():
            assert (tmp_path / example / name).read_bytes() == path.read_bytes(), name
    rehearse(cloudddp, tmp_path)
