"""The oldest botocore that pyproject.toml allows: whole commands, and the loader that takes the place of botocore's."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import botocore
import pytest
from support.harness import ROOT, TIMEOUT, CommandLine, clean_environment
from support.identity import User

COMPARE = """
import botocore, botocore.loaders, botocore.session
from cloudddp.aws import client
session = botocore.session.Session()
ours, theirs = client.model_loader(session), botocore.loaders.Loader()
for service in ("ec2", "sts", "ssm"):
    for kind in ("service-2", "endpoint-rule-set-1"):
        assert ours.load_service_model(service, kind) == theirs.load_service_model(service, kind), (service, kind)
        assert ours.list_api_versions(service, kind) == theirs.list_api_versions(service, kind)
assert set(theirs.list_available_services("service-2")) <= set(ours.list_available_services("service-2"))
try:
    ours.load_service_model("nonexistent", "service-2")
    raise AssertionError("loaded a service that does not exist")
except botocore.exceptions.UnknownServiceError:
    pass
assert ours.load_data("partitions") == theirs.load_data("partitions")
try:
    ours.load_data("nonexistent")
except botocore.exceptions.DataNotFoundError:
    print(botocore.__version__)
"""


@pytest.fixture(scope="module")
def oldest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the oldest allowed botocore, for PYTHONPATH."""
    needs = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    (bound,) = [found.group(1) for need in needs if (found := re.fullmatch(r"botocore>=([0-9.]+)", need))]
    folder = tmp_path_factory.mktemp("botocore")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    subprocess.run(
        [*pip, "install", "--target", folder, f"botocore=={bound}"],
        check=True,
        timeout=TIMEOUT,
    )
    return folder


def compared(folder: Path | None = None) -> str:
    """Return the version of botocore whose models both loaders read alike."""
    done = subprocess.run(
        [sys.executable, "-c", COMPARE],
        env=clean_environment(**({"PYTHONPATH": str(folder)} if folder else {})),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_models_equal_those_of_botocores_loader() -> None:
    assert compared() == botocore.__version__


def test_models_of_the_oldest_botocore_equal_those_of_its_loader(oldest: Path) -> None:
    assert compared(oldest) == "1.35.0"


def test_mfa_code_is_asked_once_with_the_oldest_botocore(
    cli: CommandLine, oldest: Path, tmp_path: Path
) -> None:
    """cloudddp sets an attribute of botocore's provider that is not public."""
    user = User(cli, tmp_path / "user")
    user.config(
        "[profile work]\nrole_arn = arn:aws:iam::123456789012:role/any\nsource_profile = keys\nmfa_serial = my-device\n"
        "[profile keys]\naws_access_key_id = A\naws_secret_access_key = S\n"
    )
    env = {"AWS_PROFILE": "work", "PYTHONPATH": str(oldest)}
    with user.terminal("ls", **env) as tty:
        tty.answer("MFA code for my-device", "123456")
        done = tty.end()
    assert done.code == 0, done.err
    assert user.run("ls", cold=True, **env).code == 0
    (path,) = user.cache
    assert path.stat().st_mode & 0o777 == 0o600


def test_up_status_and_down_with_the_oldest_botocore(cli: CommandLine, oldest: Path, remains: Any) -> None:
    """Started without the zygote, which has imported the installed botocore."""
    for words, message in (
        (("up", "-n", "1"), "is ready"),
        (("status",), "running"),
        (("down", "-y"), "nothing is left"),
    ):
        process = cli.start(*words, cold=True, PYTHONPATH=str(oldest))
        out, err = process.communicate(timeout=TIMEOUT)
        assert process.returncode == 0, err
        assert message in out
    assert remains().nothing
