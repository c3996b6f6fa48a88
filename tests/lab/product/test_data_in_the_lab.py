"""[[data]] from S3 on real namespace nodes: every node reads the bucket with its role, before ranks start."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from support.buckets import ROOT, make_bucket, make_profile
from support.harness import CommandLine
from support.jobs import direct
from support.simlab import client_of

from cloudddp.simulator import control

BUCKET, PROFILE = "team-data", "reading-nodes"
TRAIN = """
import os
folder = os.environ["CLOUDDDP_DATA_ONE"]
assert os.path.samefile(folder, "one"), folder
print("read", *sorted(open(f"one/{name}").read() for name in os.listdir("one")), flush=True)
try:
    open("one/new", "w")
except PermissionError:
    print("read only", flush=True)
"""


@pytest.fixture(scope="module")
def s3(lab: control.Simulator) -> Iterator[Any]:
    client = client_of(lab, "s3")
    for _ in make_bucket(client, BUCKET):
        yield client


@pytest.fixture
def cli(lab_cli: CommandLine, lab: control.Simulator, s3: Any) -> Iterator[CommandLine]:
    document = (ROOT / "infra/iam/data.json").read_text().replace("BUCKET", BUCKET).replace("PREFIX", "sets")
    lab_cli.write("train.py", TRAIN)
    for _ in make_profile(client_of(lab, "iam"), PROFILE, document):
        yield lab_cli


def settings(cli: CommandLine, prefix: str) -> None:
    cli.write(
        "cloudddp.toml",
        f'[cluster]\ninstance_profile = "{PROFILE}"\n[job]\nrendezvous = "direct"\nnproc_per_node = 1\n'
        f'[[data]]\nsource = "s3://{BUCKET}/{prefix}"\npath = "one"\n',
    )


def test_nodes_read_the_bucket_with_their_role(cli: CommandLine, s3: Any) -> None:
    for name in "ab":
        s3.put_object(Bucket=BUCKET, Key=f"sets/one/{name}", Body=name.encode())
    settings(cli, "sets/one")
    cli.ok("up", "-n", "2", "-t", "g5.12xlarge")
    done = cli.exits(0, "launch", "train.py")
    assert done.stdout.count("read a b") == 2
    assert done.stdout.count("read only") == 2
    assert done.stderr.count(f"s3://{BUCKET}/sets/one: 2 files, 2 bytes, are in") == 2
    assert "nothing to pull" in cli("pull").stderr

    s3.put_object(Bucket=BUCKET, Key="sets/one/c", Body=b"c")
    s3.delete_object(Bucket=BUCKET, Key="sets/one/a")
    assert cli.ok("launch", "train.py").count("read b c") == 2

    settings(cli, "sets/missing")
    refused = cli.fails(1, "launch", "train.py")
    assert f"s3://{BUCKET}/sets/missing/ was not copied: it has no objects" in refused
    settings(cli, "others")
    assert "is not authorized to perform: s3:ListBucket" in cli.fails(1, "launch", "train.py")


WRITES = """
import os, time
path = os.path.abspath("out/run/best.ckpt")
if os.environ["RANK"] == "1":
    os.makedirs("out/run", exist_ok=True)
    open(path, "w").close()
for _ in range(100):
    time.sleep(0.05 * (not os.path.exists(path)))
if not os.path.exists(path): raise FileNotFoundError(f"Checkpoint file not found: {path}")
"""


def test_file_that_only_another_node_has_is_named_and_can_be_shared(lab_cli: CommandLine) -> None:
    direct(lab_cli, nodes=2)
    lab_cli.write("train.py", WRITES)
    done = lab_cli.exits(1, "launch", "train.py")
    assert "only node 1 has out/run/best.ckpt; nodes share no disk: add" in done.stderr
    assert 'the lines [[shared]] and path = "out", ' in done.stderr
    lab_cli.ok("exec", "rm -rf out")
    lab_cli.write("cloudddp.toml", '[[shared]]\npath = "out"\n')
    assert "results: node 0: out/ (" in lab_cli.messages("launch", "train.py")
