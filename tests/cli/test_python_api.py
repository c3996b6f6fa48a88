"""The Python API as a program uses it: in a process of its own, which prints what the functions return."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from support.harness import ROOT, CommandLine, clean_environment, finished, remaining, wait_for
from support.jobs import homes, newest, written

import cloudddp
from cloudddp import api

TRAIN = """
import os, sys, time
print("rank", os.environ["RANK"], sys.argv[1:], "TOKEN" in os.environ, flush=True)
open(f"model-{os.environ['RANK']}.pt", "w").write("weights")
while "wait" in sys.argv:
    time.sleep(0.1)
"""
BEGIN = """
import json, signal, sys, warnings
import cloudddp
settings = {"instance_type": "g5.xlarge", "rendezvous": "direct", "stop_grace": 1}
"""


def run(cli: CommandLine, code: str) -> tuple[list[Any], str]:
    """Run Python code; return the values that it has printed as JSON, a line each, and its stderr."""
    cli.write("train.py", TRAIN)
    process = cli.start_code(BEGIN + code)
    out, err = finished(process, 0)
    return [json.loads(line) for line in out.splitlines()], err


def test_cluster_in_a_with_block_is_removed_and_its_results_are_here(cli: CommandLine, ec2: Any) -> None:
    """Of two jobs the first is not pulled: each keeps its own. `run` begins with their results."""
    code = """
with open("train.py", "a") as file:
    file.write("if len(sys.argv) > 2: open(sys.argv[1] + os.environ['RANK'], 'w').write(sys.argv[2])")
said, handlers = [], [signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM)]
with cloudddp.up(nodes=2, on_progress=said.append, **settings) as cluster:
    first = cluster.launch("train.py", ["a", "1"], env={"TOKEN": "secret-value"})
    lines = []
    result = first.wait(on_line=lines.append)
    print(json.dumps([len(cluster.nodes), cluster.nodes[1].rank, cluster.created, cluster.price > 1]))
    print(json.dumps([result.status, result.exit_code, sorted(lines)]))
    print(json.dumps([first.status().ranks, cluster.job().id == first.id, cluster.cost() > 0]))
    second = cluster.launch("train.py", ["b", "2"])
    second.wait()
    second.pull()
print(json.dumps([first.id, second.id]))
print(json.dumps(said))
print(json.dumps([signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM)] == handlers))
said = []
cloudddp.run("train.py", ["c", "3"], results=True, nodes=1, on_progress=said.append, **settings)
print(json.dumps(sorted(text for text in said if "earlier jobs" in text or " on the nodes, " in text)))
try:
    cloudddp.run("train.py", ["d", "4"], results="20200101-000000-none", **settings)
except cloudddp.UsageError as error:
    print(json.dumps(error.message))
"""
    (cluster, result, job, (first, second), said, same_handlers, (sent,), refused), err = run(cli, code)
    assert cluster == [2, 1, True, True]
    lines = [f"[rank {r} | node {r}] rank {r} ['a', '1'] True" for r in (0, 1)]
    assert result == ["succeeded", 0, lines]
    assert job == [2, True, True]
    assert any("2 x g5.xlarge at $" in text for text in said)
    assert any(f"of these, 2 files of job {first}: results/{first}" in text for text in said)
    assert not any("no results" in text for text in said)  # the last pull has nothing to do
    assert same_handlers
    assert err == ""
    results = cli.cwd / "results"
    assert (results / second / "model-0.pt").exists()
    assert (results / second / "node1" / "model-1.pt").exists()
    found = {job: {p.name for p in (results / job).glob("[a-d]?")} for job in (first, second)}
    assert found == {first: {"a0"}, second: {"b0"}}
    assert all((results / job / "cloudddp-logs/report.html").exists() for job in found)
    assert (results / first / "node1/a1").exists()
    assert f"results of {results / second} and 1 job before it on the nodes" in sent
    assert refused == f"{results} has no results of job 20200101-000000-none"
    assert remaining(ec2, cli.cluster).nothing
    kept = [path for path in Path(cli.env["CLOUDDDP_HOME"]).rglob("*") if path.is_file()]
    assert not [path for path in kept if b"secret-value" in path.read_bytes()]


def test_results_that_cannot_be_pulled_keep_the_nodes(cli: CommandLine, ec2: Any) -> None:
    cli.write("results", "a file, where the results would go")
    code = """
try:
    with cloudddp.up(nodes=2, **settings) as cluster:
        cluster.launch("train.py").wait()
except cloudddp.Leftovers as error:
    print(json.dumps([error.message, error.hint]))
cluster._found = cluster._found.only({cluster.nodes[0].id})  # as if node 1 had been replaced since
try:
    cluster.down()
except cloudddp.Leftovers as error:
    print(json.dumps([error.message, len(cluster.nodes)]))
cluster.down(discard=True)
cluster.down()
print(json.dumps(len(cluster.nodes)))
"""
    ((message, hint), (again, nodes), none), _ = run(cli, code)
    assert "was not removed: not pulled from node 0: model-0.pt" in message
    assert "results were not pulled" in message.partition("; job ")[2]  # why
    assert hint == "wait for the job or cancel it, and pull; or down(discard=True)"
    assert "node 1: model-1.pt" in again
    assert (nodes, none) == (2, 0)
    assert remaining(ec2, cli.cluster).nothing


def test_interrupt_at_the_end_of_the_block_removes_the_cluster(cli: CommandLine, ec2: Any) -> None:
    """When the results are here; and in the callback, which is called again by the handler of the signal."""
    code = """
said = []
def interrupt(text):
    said.append(text)
    if text.startswith(("logs: ", "terminating ")):
        signal.raise_signal(signal.SIGINT)
try:
    with cloudddp.up(nodes=1, on_progress=interrupt, **settings) as cluster:
        cluster.launch("train.py").wait()
except KeyboardInterrupt:
    print(json.dumps("still removing everything; this takes a moment" in said))
"""
    assert run(cli, code) == ([True], "")
    assert remaining(ec2, cli.cluster).nothing


def test_error_in_the_block_removes_the_cluster_and_stops_its_job(cli: CommandLine, ec2: Any) -> None:
    """Also if the callback fails."""
    code = """
def broken(text):
    raise ValueError("of the callback")
with warnings.catch_warnings(record=True) as found:
    try:
        with cloudddp.up(nodes=1, on_progress=broken, **settings) as cluster:
            job = cluster.launch("train.py", ["wait"])
            try:
                job.wait(timeout=1)
            except TimeoutError as error:
                print(json.dumps([str(error), job.status().status]))
            raise KeyError("mine")
    except KeyError as error:
        print(json.dumps(str(error)))
print(json.dumps(sorted({str(one.message) for one in found})))
"""
    ((late, status), mine, (warning,)), _ = run(cli, code)
    assert late.endswith("has not ended after 1 s")
    assert (status, mine) == ("running", "'mine'")
    assert warning == "on_progress failed: ValueError('of the callback')"
    assert remaining(ec2, cli.cluster).nothing
    assert list((cli.cwd / "results").glob("*/model-0.pt"))


def test_cluster_that_existed_stays_and_run_refuses_it(cli: CommandLine) -> None:
    """Limits hold for it; a coroutine that calls is warned of."""
    cli.nodes(1)
    code = """
import asyncio
given = {"nodes": 1, "instance_type": "g5.12xlarge"}
def refused(call, *words, **settings):
    try:
        call(*words, **settings)
    except cloudddp.CloudDDPError as error:
        return error.message
with cloudddp.up(**given) as cluster:
    print(json.dumps(cluster.created))
again = cloudddp.attach()
print(json.dumps(again.id == cluster.id))
again.id = "c-0123456789"  # as if that one had been removed
print(json.dumps(refused(again.job).partition(" is gone")[0]))
print(json.dumps(refused(cloudddp.run, "train.py", **given)))
limits = ({"max_hours": 0.5}, {"max_cost": 0.01})
print(json.dumps([refused(cloudddp.up, **given, **limit) for limit in limits]))
said = []
wide = {"max_hours": 100, "max_cost": 1000, "on_progress": said.append}
print(json.dumps([cloudddp.up(**given, **wide).created, said[-1]]))
async def call():
    with warnings.catch_warnings(record=True) as found:
        refused(cloudddp.up, nodes=0)
    print(json.dumps([str(one.message) for one in found]))
    with warnings.catch_warnings(record=True) as found:
        await asyncio.to_thread(refused, cloudddp.up, nodes=0)
    print(json.dumps(len(found)))
asyncio.run(call())
"""
    (created, same, gone, message, limits, (again, said), (warning,), none), _ = run(cli, code)
    assert gone == f"cluster {cli.cluster} (c-0123456789)"
    assert (created, same, again) == (False, True, False)
    assert "already exists; run creates and removes a cluster of its own" in message
    assert "more than --max-hours 0.5. Nothing was changed" in limits[0]
    assert "more than --max-cost 0.01. Nothing was changed" in limits[1]
    assert "created before, and ends in" in said
    assert warning == "cloudddp blocks the running event loop; use `await asyncio.to_thread(...)`"
    assert none == 0


def test_mistakes_are_refused_before_anything_is_created(cli: CommandLine, ec2: Any) -> None:
    code = """
for call in (
    lambda: cloudddp.up(node=2),
    lambda: cloudddp.up(nodes=0),
    lambda: cloudddp.run("trian.py", **settings),
    lambda: cloudddp.run("train.py", "--epochs 1"),
    lambda: cloudddp.up(name="mine"),
    lambda: cloudddp.up(nodes=1, instance_type="g5.12xlarge,g5.xlarge", nproc_per_node=4),
    lambda: cloudddp.attach(region="us-east-1"),
):
    try:
        call()
    except cloudddp.CloudDDPError as error:
        print(json.dumps([f"{error.message}\\n{error.hint}", error.exit_code]))
"""
    found, _ = run(cli, code)
    assert [code for _, code in found] == [2, 2, 2, 2, 2, 2, 1]
    texts = [text for text, _ in found]
    assert texts[0].startswith("node is not a setting of [cluster] or [job]\ndid you mean 'nodes'")
    assert "arguments of the script are a list: args=[...]" in texts[0]
    assert "nodes" in texts[1]
    assert "trian.py" in texts[2]
    assert texts[3] == 'args=\'--epochs 1\' is not a list of strings\nargs=["--epochs", "10"]'
    assert 'cluster="NAME" names the cluster' in texts[4]
    assert "node 0 has 1 GPU, fewer than the 4 ranks" in texts[5]  # of a type that is second choice
    assert "there is no cluster" in texts[6]
    assert "create one: `cloudddp up`" in texts[6]
    assert remaining(ec2, cli.cluster).nothing


def test_import_loads_nothing_that_is_slow() -> None:
    assert set(cloudddp._API) == set(api.__all__)
    code = "import sys, cloudddp; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    loaded = set(done.stdout.split())
    assert "cloudddp" in loaded
    assert not loaded & {"cloudddp.api", "boto3", "paramiko", "click", "msgspec", "rich", "moto"}


def test_tests_of_another_project_get_a_simulator(tmp_path: Path) -> None:
    """With the plugin, in a pytest of their own; afterwards no simulator is left. The page about CI trains in
    one."""
    (tmp_path / "conftest.py").write_text('pytest_plugins = "cloudddp.pytest"\n')
    (tmp_path / "test_training.py").write_text(
        "import os, cloudddp\n"
        "def test_place(cloudddp_sim, capsys):\n"
        "    assert os.environ['AWS_ENDPOINT_URL'] == cloudddp_sim\n"
        "    with capsys.disabled():\n"
        "        print('home:', os.environ['CLOUDDDP_HOME'], cloudddp_sim)\n"
    )
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", str(tmp_path)]
    env = clean_environment(PYTHONPATH=str(ROOT))
    done = subprocess.run(
        command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    home = done.stdout.partition("home: ")[2].split()[0]
    assert home != str(tmp_path)
    assert not Path(home).exists()


def test_job_is_watched_and_resumed(cli: CommandLine, ec2: Any) -> None:
    """A node is lost while the program watches; then a job fails by itself, and is resumed."""
    cli.write("count.py", "import os, time\nprint('began', flush=True)\n")
    with (cli.cwd / "count.py").open("a") as file:
        file.write("while not os.path.exists('enough'): time.sleep(0.05)\n")
    cli.write("fails.py", "import os\nraise SystemExit(7 if os.environ['TOKEN'] == 'x' else 0)\n")
    code = """
def refused(call, **arguments):
    try:
        call(**arguments)
    except cloudddp.CloudDDPError as error:
        return [type(error).__name__, error.message]

lines = []
with cloudddp.up(nodes=2, heartbeat=2, scratch=["enough"], **settings) as cluster:
    job = cluster.launch("count.py")
    print(json.dumps([job.id, cluster.nodes[1].id]), flush=True)
    result = cluster.watch(times=1, on_line=lines.append)
    print(json.dumps([result.job, result.exit_code, sorted(set(lines)), cluster.nodes[1].id]))
    print(json.dumps(refused(job.resume, replace=[5])))
    failed = cluster.launch("fails.py", env={"TOKEN": "x"})
    print(json.dumps([failed.wait().exit_code, refused(failed.resume)]))
    again = failed.resume(env={"TOKEN": "y"})
    print(json.dumps([again.wait().exit_code, again.status().resumed_from == failed.id]))
"""
    cli.env["CLOUDDDP_TIME_SCALE"] = "0.3"
    process = cli.start_code(BEGIN + code)
    job, lost = json.loads(process.stdout.readline())
    written(cli, "began", job=job)
    ec2.terminate_instances(InstanceIds=[lost])
    wait_for(lambda: (newest(cli)["state"], newest(cli)["resumed_from"]) == ("running", job), "it is resumed")
    written(cli, "began", job=newest(cli)["id"])
    for home in homes(cli):
        (home / "project/enough").touch()
    out, _ = finished(process, 0)
    watched, error, first, second = map(json.loads, out.splitlines())
    assert watched[:3] == [watched[0], 0, ["[rank 0 | node 0] began", "[rank 1 | node 1] began"]]
    assert job not in watched
    assert lost not in watched
    assert error == ["UsageError", "--replace 5: the cluster has no such node"]
    assert first[0] == 7
    assert first[1][0] == "UsageError"
    assert "the value of TOKEN" in first[1][1]
    assert second == [0, True]
    assert remaining(ec2, cli.cluster).nothing
