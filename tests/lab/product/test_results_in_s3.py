"""S3 on real namespace nodes. `results_s3`: the nodes copy results by themselves, and `pull` reads them when
the nodes have gone. [[data]]: every node reads the bucket with its role, before ranks start."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.buckets import ROOT, make_bucket, make_profile, objects, policy
from support.harness import CommandLine, instances_of, remaining, wait_for
from support.simlab import client_of

from cloudddp.simulator import control

BUCKET, PROFILE, READER = "team-results", "training-nodes", "reading-nodes"
TRAIN = """
import os, pathlib
rank = os.environ["RANK"]
folder = pathlib.Path("runs/a b")
folder.mkdir(parents=True, exist_ok=True)
(folder / f"model-{rank}.pt").write_text("weights of " + rank)
if rank == "0":
    for link, target in (folder / "last.pt", "model-0.pt"), (pathlib.Path("runs/passwd"), "/etc/passwd"):
        link.unlink(missing_ok=True)
        link.symlink_to(target)
    (folder / "large").write_bytes(bytes(range(256)) * (40 << 12))
print("trained", rank, flush=True)
"""


@pytest.fixture(scope="module")
def s3(lab: control.Simulator) -> Iterator[Any]:
    client = client_of(lab, "s3")
    for _ in make_bucket(client, BUCKET):
        yield client


@pytest.fixture(scope="module")
def iam(lab: control.Simulator, s3: Any) -> Iterator[Any]:
    client = client_of(lab, "iam")
    for _ in make_profile(client, PROFILE, policy(BUCKET, "team/")):
        yield client


@pytest.fixture
def cli(lab_cli: CommandLine, iam: Any) -> CommandLine:
    lab_cli.write(
        "cloudddp.toml",
        f'[cluster]\ninstance_profile = "{PROFILE}"\n[job]\nrendezvous = "direct"\nnproc_per_node = 1\n'
        f'results_s3 = "s3://{BUCKET}/team"\n',
    )
    lab_cli.write("train.py", TRAIN)
    return lab_cli


def up(cli: CommandLine) -> None:
    cli.ok("up", "-n", "2", "-t", "g5.12xlarge")


def launched(cli: CommandLine, *words: str, **env: str) -> tuple[str, str]:
    """Launch a job that nobody follows; return its id, and what was printed to stderr."""
    done = cli.exits(0, "launch", "-d", *words, **env)
    return done.stdout.strip(), done.stderr


def terminated(cli: CommandLine, ec2: Any) -> None:
    wait_for(lambda: not instances_of(ec2, cli.cluster), "the nodes have terminated")


def in_s3(s3: Any, cli: CommandLine, job: str) -> dict[str, int]:
    prefix = f"team/{cli.cluster}/{job}/"
    return {key.removeprefix(prefix): size for key, size in objects(s3, BUCKET, prefix).items()}


def copies(cli: CommandLine) -> list[dict[str, Any]]:
    return list(json.loads(cli.ok("jobs", "--json"))[-1]["copied"])


def test_results_are_copied_to_s3_and_pulled_from_there(
    cli: CommandLine, ec2: Any, s3: Any, iam: Any
) -> None:
    up(cli)
    done = cli.messages("launch", "train.py")
    assert f"the nodes copy outputs and logs to s3://{BUCKET}/team/{cli.cluster}/" in done
    wait_for(lambda: {one["state"] for one in copies(cli)} == {"complete"}, "the copy is complete")
    first, second = copies(cli)
    assert (first["node"], first["error"], first["left_out"]) == (0, None, 1)
    assert first["notes"] == [
        "runs/passwd: a link to /etc/passwd: 1 file below it is older than the first job"
    ]
    assert second["files"] == second["expected_files"] > 0
    assert re.search(r"node 1: \d+ files, .* copied to s3://team-results/team/", cli("jobs").stderr)

    iam.put_role_policy(RoleName=PROFILE, PolicyName="results", PolicyDocument=policy(BUCKET, "other/"))
    cli.write("denied.py", "open('ran', 'w')")
    denied = cli("launch", "-d", "denied.py")
    iam.put_role_policy(RoleName=PROFILE, PolicyName="results", PolicyDocument=policy(BUCKET, "team/"))
    assert denied.returncode == 1
    assert "node 0: results cannot be copied to s3://team-results/team/" in denied.stderr
    assert "is not authorized to perform: s3:PutObject" in denied.stderr
    assert "ran" not in cli.ok("exec", "ls"), "an upload is tried before ranks start"

    job, err = launched(cli, "--down", "--keep", "0", "train.py")
    url = f"s3://{BUCKET}/team/{cli.cluster}/{job}/"
    assert f"each node copies its results to {url} when the job has ended" in err
    terminated(cli, ec2)
    found = in_s3(s3, cli, job)
    assert found["node-0/outputs/runs/a b/large"] == 40 << 20
    assert {
        "node-1/outputs/runs/a b/model-1.pt",
        "node-0/logs/ranks/0.log",
        "node-1/logs/verdict.json",
    } <= found.keys()
    assert not any("passwd" in key for key in found)

    gone = cli.fails(1, "jobs")
    assert f"job {job} was told to copy its results to {url}: `cloudddp --sim pull --job {job}` reads" in gone

    cli.ok("pull", "--all-nodes")
    base = Path(cli.cwd, "results", job)
    assert (base / "node1/runs/a b/model-1.pt").read_text() == "weights of 1"
    assert (base / "runs/a b/last.pt").readlink() == Path("model-0.pt")
    assert (base / "runs/a b/large").read_bytes() == bytes(range(256)) * (40 << 12)
    assert "trained 1" in (base / "cloudddp-logs/node1/ranks/1.log").read_text()
    cli.ok("down", "-y")
    assert cli("pull", "--job", job, "--to", "again").returncode == 0
    Path(cli.cwd, "again/runs/a b/model-0.pt").write_text("mine")
    newer = cli.messages("pull", "--job", job, "--to", "again", "runs/a b/model-0.pt")
    assert "left out runs/a b/model-0.pt: the file on this computer is newer" in newer
    assert Path(cli.cwd, "again/runs/a b/model-0.pt").read_text() == "mine"
    for name in found:
        s3.delete_object(Bucket=BUCKET, Key=f"team/{cli.cluster}/{job}/{name}")
    assert "nothing to pull: no files of node 0" in cli.fails(1, "pull", "--job", job, "--all-nodes")


def test_unreachable_s3_does_not_keep_the_nodes(cli: CommandLine, ec2: Any, s3: Any) -> None:
    up(cli)
    cli.write(
        "wait.py", "import pathlib, time\nwhile not pathlib.Path('/tmp/go').exists(): time.sleep(0.05)\n"
    )
    job, _ = launched(cli, "--down", "--keep", "0", "wait.py")
    (group,) = remaining(ec2, cli.cluster).groups
    everything = [{"IpProtocol": "-1", "IpRanges": [{"CidrIp": "0.0.0.0/0"}]}]
    ec2.revoke_security_group_egress(GroupId=group, IpPermissions=everything)
    cli.ok("exec", "--", "touch /tmp/go")
    terminated(cli, ec2)
    assert "node-0/copied.json" not in in_s3(s3, cli, job)
    assert "node 0 ended before it had copied everything" in cli.fails(1, "pull")


# -- [[data]] ------------------------------------------------------------------------------------------------


READS = """
import os
folder = os.environ["CLOUDDDP_DATA_ONE"]
assert os.path.samefile(folder, "one"), folder
print("read", *sorted(open(f"one/{name}").read() for name in os.listdir("one")), flush=True)
try:
    open("one/new", "w")
except PermissionError:
    print("read only", flush=True)
"""


@pytest.fixture
def reader(lab_cli: CommandLine, lab: control.Simulator, s3: Any) -> Iterator[CommandLine]:
    document = (ROOT / "infra/iam/data.json").read_text().replace("BUCKET", BUCKET).replace("PREFIX", "sets")
    lab_cli.write("train.py", READS)
    for _ in make_profile(client_of(lab, "iam"), READER, document):
        yield lab_cli


def settings(cli: CommandLine, prefix: str) -> None:
    cli.write(
        "cloudddp.toml",
        f'[cluster]\ninstance_profile = "{READER}"\n[job]\nrendezvous = "direct"\nnproc_per_node = 1\n'
        f'[[data]]\nsource = "s3://{BUCKET}/{prefix}"\npath = "one"\n',
    )


def test_nodes_read_the_bucket_with_their_role(reader: CommandLine, s3: Any) -> None:
    for name in "ab":
        s3.put_object(Bucket=BUCKET, Key=f"sets/one/{name}", Body=name.encode())
    settings(reader, "sets/one")
    reader.ok("up", "-n", "2", "-t", "g5.12xlarge")
    done = reader.exits(0, "launch", "train.py")
    assert done.stdout.count("read a b") == 2
    assert done.stdout.count("read only") == 2
    assert done.stderr.count(f"s3://{BUCKET}/sets/one: 2 files, 2 bytes, are in") == 2
    assert "nothing to pull" in reader("pull").stderr

    s3.put_object(Bucket=BUCKET, Key="sets/one/c", Body=b"c")
    s3.delete_object(Bucket=BUCKET, Key="sets/one/a")
    assert reader.ok("launch", "train.py").count("read b c") == 2

    settings(reader, "sets/missing")
    refused = reader.fails(1, "launch", "train.py")
    assert f"s3://{BUCKET}/sets/missing/ was not copied: it has no objects" in refused
    settings(reader, "others")
    assert "is not authorized to perform: s3:ListBucket" in reader.fails(1, "launch", "train.py")
