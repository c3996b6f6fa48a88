"""The wheel: built, installed into a clean environment outside the checkout, and used from there."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from support.harness import ROOT, clean_environment

from cloudddp.agent import program
from cloudddp.files import EXAMPLES, payload_example

pytestmark = pytest.mark.xdist_group("packaging")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("build", reason="building the wheel needs the extra `dev`")
    out = tmp_path_factory.mktemp("dist")
    subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), str(ROOT)],
        check=True,
        capture_output=True,
        timeout=300,
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
    assert {"cloudddp/py.typed", "cloudddp/job/slurm.sh", "cloudddp/sim/iam/ec2_authorization.json"} <= set(
        names
    )


@pytest.mark.timeout(600)
def test_installed_wheel_works_outside_the_checkout(wheel: Path, tmp_path: Path) -> None:
    """Core first (its size is limited), then with the simulator: init and up from a clean environment."""
    venv = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(venv)], check=True, timeout=120)
    python = str(venv / "bin" / "python")
    pip = [sys.executable, "-m", "pip", "--python", python, "--disable-pip-version-check", "install"]
    pip += ["--no-compile", "-q", "-c", str(ROOT / "constraints.txt")]
    (site,) = (venv / "lib").glob("python3*/site-packages")

    def install(what: str) -> None:
        done = subprocess.run([*pip, what], capture_output=True, text=True, timeout=400, check=False)
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
    env = clean_environment(CLOUDDDP_HOME=str(tmp_path / "home"))
    env["PATH"] = f"{venv / 'bin'}:/usr/local/bin:/usr/bin:/bin"

    def cloudddp(*words: str, cwd: Path = tmp_path) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(venv / "bin" / "cloudddp"), *words],
            cwd=cwd,
            env=env,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )

    code = "from cloudddp.agent import program; print(program.agent_path())"
    agent = subprocess.run([python, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert agent.stdout.strip() == program.agent_path()  # as built from the checkout

    missing = cloudddp("--sim", "ls")
    assert missing.returncode == 1
    assert "cloudddp[sim]" in missing.stderr
    install(f"{wheel}[sim]")
    # pip --no-compile leaves the byte code to the simulator's first start, which has a time limit.
    code = "import cloudddp.sim.api.server, moto.server"
    subprocess.run([python, "-c", code], cwd=tmp_path, env=env, check=True, timeout=300)
    for example in EXAMPLES:
        made = cloudddp("init", "--example", example, example)
        assert made.returncode == 0, made.stderr
        for name, path in payload_example(example).items():
            assert (tmp_path / example / name).read_bytes() == path.read_bytes(), name
    made = cloudddp("init", "project")
    assert made.returncode == 0, made.stderr
    project = tmp_path / "project"
    (project / "hello.py").write_text("import os; print('hello from', os.environ['RANK'])\n")
    try:
        up = cloudddp("--sim", "up", "-n", "1", cwd=project)
        assert up.returncode == 0, up.stderr
        ran = cloudddp("--sim", "launch", "--rendezvous", "direct", "hello.py", cwd=project)
        assert "[rank 0 | node 0] hello from 0" in ran.stdout, ran.stderr
        down = cloudddp("--sim", "down", "-y", cwd=project)
        assert "nothing is left" in down.stdout, down.stderr
    finally:
        cloudddp("sim", "stop")
