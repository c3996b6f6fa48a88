"""Settings of jobs: where [[data]] is in the project and its variable; job.container; what is refused."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from support import file_modes
from support.programs import program

from agent.node import docker
from cloudddp.agent.protocol.start import Container, SetupReply
from cloudddp.config import settings
from cloudddp.config.settings import Layer
from cloudddp.config.spec import Config, JobSpec
from cloudddp.errors import UsageError
from cloudddp.job import project_files, setup, slurm
from cloudddp.job.job_request import Script

ROLE = {"cluster": {"instance_profile": "nodes"}}


def resolved(*data: dict[str, Any], **more: Any) -> Config:
    return settings.resolve([Layer("file", {"data": list(data), **more})])


@pytest.mark.parametrize(
    ("data", "place", "variable"),
    [
        ({"source": "./sets/a-b/"}, "sets/a-b", "CLOUDDDP_DATA_SETS_A_B"),
        ({"source": "~/datasets/digits"}, "digits", "CLOUDDDP_DATA_DIGITS"),
        ({"source": "../beside"}, "beside", "CLOUDDDP_DATA_BESIDE"),
        ({"source": "data", "path": "in/here"}, "in/here", "CLOUDDDP_DATA_IN_HERE"),
        ({"source": "s3://bucket/a/b/"}, "b", "CLOUDDDP_DATA_B"),
    ],
)
def test_where_data_is(data: dict[str, Any], place: str, variable: str) -> None:
    (found,) = resolved(data, **ROLE).data
    assert (found.place, found.variable) == (place, variable)


@pytest.mark.parametrize(
    ("data", "why"),
    [
        *(([{"source": source}], "has no path in the project") for source in ("..", "/", "~")),
        ([{"source": "data", "path": "../up"}], "path"),
        ([{"source": "data", "path": "/abs"}], "path"),
        ([{"source": "\u65e5\u672c"}], "no letter or digit"),
        ([{"source": "a"}, {"source": "a"}], "overlaps the path a"),
        ([{"source": "a"}, {"source": "a/b"}], "overlaps the path a"),
        ([{"source": "a-b"}, {"source": "a_b"}], "has the same variable as a-b, CLOUDDDP_DATA_A_B"),
        ([{"source": "results"}], "overlaps results, where jobs write results"),
        ([{"source": "data", "path": ".git/hooks"}], "overlaps .git"),
        ([{"source": "data", "path": "cloudddp.toml"}], "overlaps cloudddp.toml"),
        ([{"source": f"set{n}"} for n in range(51)], "51 times [[data]], and at most 50"),
        ([{"path": "x"}], "[[data]] has no source"),
        ([{"source": "s3://bucket/../x"}], "source"),
        ([{"source": "s3://bucket/x"}], "needs cluster.instance_profile"),
    ],
)
def test_data_that_cannot_be_sent_is_refused(data: list[dict[str, Any]], why: str) -> None:
    with pytest.raises(UsageError) as caught:
        resolved(*data)
    assert why in str(caught.value)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A project with a package named src, beside a folder of data of that name."""
    for name in ("project/src/lib.py", "project/train.py", "outside/src/x.bin", "outside/src/prod.vars"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x")
    return tmp_path / "project"


@pytest.mark.parametrize(
    ("data", "why"),
    [
        ({"source": "missing"}, "is not a folder"),
        ({"source": "train.py"}, "is not a folder"),
        ({"source": "~no-such-user/x"}, "is not a folder"),
        ({"source": "~", "path": "everything"}, "is your home folder"),
    ],
)
def test_source_that_is_no_folder_of_data_is_refused(
    project: Path, monkeypatch: pytest.MonkeyPatch, data: dict[str, str], why: str
) -> None:
    monkeypatch.setenv("HOME", str(project.parent / "outside"))
    with pytest.raises(UsageError) as caught:
        project_files.of_config(project, resolved(data))
    assert why in str(caught.value)


def test_data_in_a_folder_of_results_is_refused() -> None:
    with pytest.raises(UsageError, match=r"overlaps data/out, where jobs write results"):
        resolved({"source": "data"}, job={"outputs": ["data/out"]})


@pytest.mark.parametrize(
    ("data", "name"),
    [
        ({"source": "../outside/src"}, "src/lib.py"),
        ({"source": "../outside", "path": "train.py"}, "train.py"),
        ({"source": "../outside", "path": "train.py/deeper"}, "train.py"),
        ({"source": "s3://bucket/src"}, "src/lib.py"),
    ],
)
def test_data_never_takes_the_place_of_files_of_the_project(
    project: Path, data: dict[str, str], name: str
) -> None:
    with pytest.raises(UsageError) as caught:
        project_files.of_config(project, resolved(data, **ROLE))
    assert f"where the project has {name}" in str(caught.value)


def test_every_file_of_a_folder_is_sent_but_secrets(project: Path) -> None:
    config = resolved({"source": "../outside/src", "path": "sets"}, {"source": "src"})
    secret = project.parent / "outside/src/prod.vars"
    found = project_files.of_config(project, config, secret_files=iter([secret]))
    assert set(found.manifest) == {"src/lib.py", "train.py", "sets/x.bin"}
    assert found.withheld == ("sets/prod.vars",)
    assert found.locate("sets/x.bin") == str(project / "../outside/src/x.bin")


def test_folder_that_cannot_be_read_is_named(project: Path) -> None:
    locked = project.parent / "outside/src/locked"
    locked.mkdir(mode=0)
    config = resolved({"source": "../outside/src", "path": "sets"})
    with pytest.raises(UsageError, match=r"cannot read .*locked"):
        file_modes.applied_to(lambda: project_files.of_config(project, config))
    locked.chmod(0o700)  # so that pytest can remove it


# -- job.container: what nodes are asked for, and what is said of an image -----------------------------------


IMAGE = "pytorch/pytorch:2.9.1"
ECR = "123456789012.dkr.ecr.eu-central-1.amazonaws.com/team/train@sha256:" + "a" * 64


def contained(image: str, **cluster: Any) -> Config:
    return resolved(job={"container": image}, cluster=cluster)


def test_names_of_images() -> None:
    """Those of ECR need a role; and a Slurm script has no container."""
    for image in (IMAGE, "localhost:5000/a/b", "nvcr.io/nvidia/pytorch:25.09-py3", "x1"):
        assert contained(image).job.container == image
    for image in ("-v/:/host", "--privileged", "a b", "a;b", "a$(b)", "a" * 256):
        with pytest.raises(UsageError, match=r"job\.container"):
            contained(image)
    with pytest.raises(UsageError, match="log in to ECR"):
        contained(ECR)
    assert contained(ECR, instance_profile="nodes").job.container == ECR
    with pytest.raises(UsageError, match="without a container"):
        slurm.render(contained(IMAGE), Script("train.py"), slurm.SlurmOptions())


def test_torch_is_needed_for_torchrun_only() -> None:
    assert setup.container_of(JobSpec(), gpus=8) is None
    for rendezvous, torch in (("c10d", True), ("static", True), ("direct", False)):
        spec = JobSpec(container=IMAGE, rendezvous=rendezvous)
        assert setup.container_of(spec, gpus=8) == Container(IMAGE, gpus=True, torch=torch)


DAEMON = "Error response from daemon:"
# What the programs write -> what the hint has.
HINTS = {
    "bash: line 1: exec: docker: not found": "Deep Learning AMI",
    "bash: line 1: docker: command not found": "Deep Learning AMI",
    "Cannot connect to the Docker daemon at unix:///var/run/docker.sock. Is it running?": "start docker",
    "permission denied while trying to connect to the Docker daemon socket": "usermod -aG docker",
    f"{DAEMON} pull access denied for x, repository does not exist or may require": "correct job.container",
    f"{DAEMON} manifest for pytorch/pytorch:9 not found: manifest unknown: x": "correct job.container",
    f'{DAEMON} failed to resolve reference "docker.io/a/b:1": not found': "correct job.container",
    "failed to register layer: write /opt/conda/x: no space left on device": "--disk-gb",
    f'docker: {DAEMON} could not select device driver "" with capabilities: [[gpu]].': "Container Toolkit",
    "bash: line 1: aws: command not found": "AWS CLI",
    "Unable to locate credentials. You can configure credentials by running": "container.json",
    "User: arn:x is not authorized to perform: ecr:GetAuthorizationToken": "container.json",
    "no matching manifest for linux/arm64/v8 in the manifest list entries": "CPU architecture",
    'docker: exec: "python3": executable file not found in $PATH': "job.python",
    "it has no torch, and torchrun needs it": "--rendezvous direct",
    "its Python is 3.8, and ranks need 3.9": "Python 3.9 or newer",
    "something else": "correct it",
}


@pytest.mark.parametrize(("line", "hint"), HINTS.items())
def test_every_problem_is_one_line_with_a_hint(line: str, hint: str) -> None:
    output = f"Using default tag: latest\n{line}\nRun 'docker run --help' for more information\n"
    found = setup.container_error(3, SetupReply(1, output=output, image=IMAGE), IMAGE)
    assert str(found) == f"node 3: {IMAGE}: {line}"
    assert hint in found.hint


def pulled(image: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, list[str]]:
    """Run the command that pulls an image, with programs that record their calls; return its stdout, and
    these."""
    docker_program = 'echo "docker $* $(cat)" >> calls; ls -d "$DOCKER_CONFIG" >> calls; true'
    program(tmp_path / "docker", docker_program)
    program(tmp_path / "aws", 'echo "aws $*" >> calls; echo TOKEN')
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(docker, "PROGRAM", str(tmp_path / "docker"))
    command = ["bash", "-c", docker.pull(image)]
    done = subprocess.run(
        command, cwd=tmp_path, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=True
    )
    return done.stdout, (tmp_path / "calls").read_text().splitlines()


def test_pull_logs_in_to_ecr_and_leaves_no_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, calls = pulled(ECR, tmp_path, monkeypatch)
    registry = ECR.partition("/")[0]
    folder = calls[2]
    assert calls == [
        "aws ecr get-login-password --region eu-central-1",
        f"docker login --username AWS --password-stdin {registry} TOKEN",
        folder,
        f"docker pull {ECR} ",
        folder,
    ]
    assert (folder.startswith("/dev/shm/"), Path(folder).exists()) == (True, False)
    # Other registries need no login.
    for image in (IMAGE, "evil.example/x.dkr.ecr.us-east-1.amazonaws.com/y"):
        (tmp_path / "calls").unlink(missing_ok=True)
        assert pulled(image, tmp_path, monkeypatch)[1][0] == f"docker pull {image} "
