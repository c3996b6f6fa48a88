"""job.container: what nodes are asked for, and what is said of an image that cannot be used."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from agent.node import docker
from cloudddp.agent.protocol.codec import ProtocolError
from cloudddp.agent.protocol.start import Container, SetupReply
from cloudddp.config import settings
from cloudddp.config.settings import Layer
from cloudddp.config.spec import Config, JobSpec
from cloudddp.errors import NodeError, UsageError
from cloudddp.job import containers, slurm
from cloudddp.job.job_request import Script

IMAGE = "pytorch/pytorch:2.9.1"
ECR = "123456789012.dkr.ecr.eu-central-1.amazonaws.com/team/train@sha256:" + "a" * 64


def resolved(image: str, **cluster: Any) -> Config:
    return settings.resolve([Layer("file", {"job": {"container": image}, "cluster": cluster})])


@pytest.mark.parametrize("image", [IMAGE, "localhost:5000/a/b", "nvcr.io/nvidia/pytorch:25.09-py3", "x1"])
def test_names_of_images(image: str) -> None:
    assert resolved(image).job.container == image


@pytest.mark.parametrize(
    "image", ["", "-v/:/host", "--privileged", "a b", "a;b", "a$(b)", "a//b", "a:", "a" * 501]
)
def test_other_texts_are_refused(image: str) -> None:
    with pytest.raises(UsageError, match=r"job\.container"):
        resolved(image)


def test_option_in_place_of_an_image_is_refused_by_the_agent() -> None:
    with pytest.raises(ProtocolError):
        Container("--privileged")
    with pytest.raises(ProtocolError):
        Container("a", id="--privileged")


def test_ecr_needs_a_role() -> None:
    with pytest.raises(UsageError, match="log in to ECR"):
        resolved(ECR)
    assert resolved(ECR, instance_profile="nodes").job.container == ECR


def test_slurm_script_has_no_container() -> None:
    with pytest.raises(UsageError, match="without a container"):
        slurm.render(resolved(IMAGE), Script("train.py"), slurm.SlurmOptions())


def test_torch_is_needed_for_torchrun_only() -> None:
    assert containers.of_nodes(JobSpec(), {}) == {}
    for rendezvous, torch in (("c10d", True), ("static", True), ("direct", False)):
        spec = JobSpec(container=IMAGE, rendezvous=rendezvous)
        (found,) = containers.of_nodes(spec, {0: PROBE}).values()
        assert found == Container(IMAGE, gpus=True, torch=torch)


PROBE: Any = type("Probe", (), {"gpus": 8})


def test_image_differs_between_nodes() -> None:
    replies = {node: SetupReply(0, image=f"sha256:{node // 2}") for node in range(3)}
    with pytest.raises(NodeError, match="sha256:0 on node 0, 1; sha256:1 on node 2"):
        containers.same_image(Container(IMAGE), replies)
    containers.same_image(Container(IMAGE), {0: replies[0], 1: replies[1]})


DAEMON = "Error response from daemon:"
# What the programs write -> what is said of it.
PROBLEMS = {
    "bash: line 1: exec: docker: not found": "Docker is not installed",
    "bash: line 1: docker: command not found": "Docker is not installed",
    "Cannot connect to the Docker daemon at unix:///var/run/docker.sock. Is it running?": "does not run",
    "permission denied while trying to connect to the Docker daemon socket": "may not use Docker",
    f"{DAEMON} pull access denied for x, repository does not exist or may require": "does not exist",
    f"{DAEMON} manifest for pytorch/pytorch:9 not found: manifest unknown: x": "does not exist",
    f'{DAEMON} failed to resolve reference "docker.io/a/b:1": not found': "does not exist",
    "failed to register layer: write /opt/conda/x: no space left on device": "does not fit on the disk",
    f'docker: {DAEMON} could not select device driver "" with capabilities: [[gpu]].': "Container Toolkit",
    "bash: line 1: aws: command not found\nError: Cannot perform an interactive login": "AWS CLI is missing",
    "Unable to locate credentials. You can configure credentials by running": "may not pull",
    "User: arn:x is not authorized to perform: ecr:GetAuthorizationToken": "may not pull",
    "no matching manifest for linux/arm64/v8 in the manifest list entries": "another kind of processor",
    'docker: exec: "python3": executable file not found in $PATH': "lacks a program: docker: exec",
    "it has no torch": f"{IMAGE} has no torch, and torchrun needs it",
    "its Python is 3.8": f"{IMAGE}: its Python is 3.8",
    "something else": "docker pull x: something else",
}


@pytest.mark.parametrize(("output", "said"), PROBLEMS.items())
def test_every_problem_is_one_sentence(output: str, said: str) -> None:
    reply = SetupReply(1, command="docker pull x", output=output, image=IMAGE)
    found = containers.error(3, reply)
    assert str(found).startswith("node 3: ")
    assert said in str(found)
    assert "\n" not in str(found)
    assert found.hint


def pulled(image: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, list[str]]:
    """Run the command that pulls an image, with programs that record their calls; return its stdout, and
    these."""
    for name, text in {
        "docker": 'echo "docker $* $(cat)" >> calls; ls -d "$DOCKER_CONFIG" >> calls; true',
        "aws": 'echo "aws $*" >> calls; echo TOKEN',
    }.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    command = ["bash", "-c", docker.pull(image)]
    done = subprocess.run(
        command, cwd=tmp_path, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=True
    )
    return done.stdout, (tmp_path / "calls").read_text().splitlines()


def test_pull_logs_in_to_ecr_and_leaves_no_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, calls = pulled(ECR, tmp_path, monkeypatch)
    registry = ECR.partition("/")[0]
    assert calls[0] == "aws ecr get-login-password --region eu-central-1"
    assert calls[1] == f"docker login --username AWS --password-stdin {registry} TOKEN"
    assert calls[3] == f"docker pull {ECR} "
    assert calls[2] == calls[4]
    assert calls[2].startswith("/dev/shm/")
    assert not Path(calls[2]).exists()


def test_other_registries_need_no_login(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for image in (IMAGE, "evil.example/x.dkr.ecr.us-east-1.amazonaws.com/y"):
        (tmp_path / "calls").unlink(missing_ok=True)
        assert pulled(image, tmp_path, monkeypatch)[1][0] == f"docker pull {image} "
