"""What each node starts for a job: argv, environment and rendezvous, from plain values."""

from __future__ import annotations

import importlib.util
import json
import runpy
from pathlib import Path
from typing import Any

import pytest
from support.jobstates import launch_node

from cloudddp.config.spec import JobSpec
from cloudddp.errors import CloudDDPError, UsageError
from cloudddp.job import ranks
from cloudddp.job.ranks import LaunchNode, NodePlan, Script

SCRIPT = Script("train.py", ("--epochs", "3"))
OF_RANKS = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "GROUP_RANK", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT"}


def host(rank: int, **changes: Any) -> LaunchNode:
    own = {"interface": f"ens{rank + 5}", "python": f"/py{rank}", "free_port": 40000 + rank}
    return launch_node(rank, **{"gpus": 4, **own, **changes})


def make_plans(job: JobSpec, hosts: list[LaunchNode], script: Script = SCRIPT) -> list[NodePlan]:
    return ranks.plan(job, hosts, script, job_id="job-1", cluster="demo")


def test_c10d_has_one_endpoint_and_an_explicit_host() -> None:
    plans = make_plans(JobSpec(nproc_per_node=2), [host(0), host(1)])
    for plan in plans:
        (process,) = plan.processes
        assert process.launcher[:2] == (f"/py{plan.node}", "-c")
        assert "torch.distributed.run" in process.launcher[2]
        options = {"--nnodes=2", "--nproc-per-node=2", "--max-restarts=0", "--rdzv-backend=c10d"}
        options |= {
            "--rdzv-id=job-1",
            "--rdzv-endpoint=10.0.0.1:40000",
            f"--local-addr=10.0.0.{plan.node + 1}",
        }
        options.add(f"--rdzv-conf=is_host={'true' if plan.node == 0 else 'false'},read_timeout=600")
        assert options <= set(process.launcher)
        assert not any(word.startswith(("--node-rank", "--master")) for word in process.launcher)
        assert process.launcher[-1] == "--no-python"
        assert process.rank == (f"/py{plan.node}", "train.py", "--epochs", "3")
        assert not OF_RANKS & {*plan.env, *process.env}


def test_static_sets_node_ranks_and_the_master() -> None:
    plans = make_plans(
        JobSpec(nproc_per_node=1, rendezvous="static", master_port=29400), [host(k) for k in range(3)]
    )
    for plan in plans:
        (process,) = plan.processes
        options = {f"--node-rank={plan.node}", "--master-addr=10.0.0.1", "--master-port=29400"}
        assert options | {f"--local-addr=10.0.0.{plan.node + 1}"} <= set(process.launcher)
        assert not any(word.startswith("--rdzv") for word in process.launcher)
        assert process.rank[1:] == ("train.py", "--epochs", "3")


def test_torchrun_gets_its_own_rank_count_and_max_restarts() -> None:
    plans = make_plans(JobSpec(nproc_per_node=(3, 1), max_restarts=2), [host(0), host(1)])
    assert [plan.ranks for plan in plans] == [3, 1]
    for plan, count in zip(plans, (3, 1), strict=True):
        assert {f"--nproc-per-node={count}", "--max-restarts=2"} <= set(plan.processes[0].launcher)
        assert len(plan.processes) == 1


def test_direct_ranks_get_the_variables_of_env_rendezvous() -> None:
    plans = make_plans(JobSpec(nproc_per_node=2, rendezvous="direct"), [host(0), host(1)])
    found = [process for plan in plans for process in plan.processes]
    sizes = {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "40000"}
    assert [process.env for process in found] == [
        sizes | {"RANK": str(rank), "LOCAL_RANK": str(rank % 2), "GROUP_RANK": str(rank // 2)}
        for rank in range(4)
    ]
    for rank, process in enumerate(found):
        assert process.launcher == ()
        assert process.rank == (f"/py{rank // 2}", "train.py", "--epochs", "3")


def test_ranks_are_numbered_across_unequal_nodes() -> None:
    counts = (1, 3, 2)
    plans = make_plans(JobSpec(nproc_per_node=counts, rendezvous="direct"), [host(k) for k in range(3)])
    numbers = [[int(process.env["RANK"]) for process in plan.processes] for plan in plans]
    assert numbers == [[0], [1, 2, 3], [4, 5]]
    assert [plan.processes[0].env["LOCAL_WORLD_SIZE"] for plan in plans] == ["1", "3", "2"]
    assert {process.env["WORLD_SIZE"] for plan in plans for process in plan.processes} == {"6"}


def test_positional_ranks_follow_the_script_arguments() -> None:
    job = JobSpec(nproc_per_node=(1, 2), rendezvous="direct", positional_ranks=True)
    plans = make_plans(job, [host(0), host(1)])
    assert [list(process.rank[1:]) for plan in plans for process in plan.processes] == [
        ["train.py", "--epochs", "3", "0", "0"],
        ["train.py", "--epochs", "3", "1", "0"],
        ["train.py", "--epochs", "3", "2", "1"],
    ]


@pytest.mark.parametrize("rendezvous", ["c10d", "static"])
def test_positional_ranks_with_torchrun_are_refused(rendezvous: Any) -> None:
    with pytest.raises(UsageError, match="positional_ranks"):
        make_plans(JobSpec(rendezvous=rendezvous, positional_ranks=True), [host(0)])


@pytest.mark.parametrize("rendezvous", ["c10d", "static", "direct"])
def test_module_is_run_with_m(rendezvous: Any) -> None:
    job = JobSpec(nproc_per_node=1, rendezvous=rendezvous, torchrun_args=("--numa-binding=node", "-t3"))
    (plan,) = make_plans(job, [host(0)], Script("pkg.train", ("-x",), module=True))
    assert plan.processes[0].rank == ("/py0", "-m", "pkg.train", "-x")
    options = ("--numa-binding=node", "-t3", "--no-python") if rendezvous != "direct" else ()
    assert plan.processes[0].launcher[-3:] == options


def torchrun_macros() -> Any:
    """Return torchrun's substitution from its module, which needs nothing of torch."""
    torch = importlib.util.find_spec("torch")
    if torch is None or torch.origin is None:
        pytest.skip("no torch")
    module = Path(torch.origin).parent / "distributed" / "elastic" / "utils" / "api.py"
    return runpy.run_path(str(module))["macros"]


@pytest.mark.parametrize(
    ("rendezvous", "expected"),
    [("c10d", "$$$$x-$${local_rank}"), ("static", "$$$$x-$${local_rank}"), ("direct", "$$x-${local_rank}")],
)
def test_arguments_survive_the_substitution_by_torchrun(rendezvous: Any, expected: str) -> None:
    """torchrun replaces $$ by $, and ${local_rank}, in the arguments of ranks."""
    job = JobSpec(nproc_per_node=1, rendezvous=rendezvous)
    (plan,) = make_plans(job, [host(0)], Script("train.py", ("$$x-${local_rank}",)))
    assert plan.processes[0].rank[-1] == expected
    if plan.processes[0].launcher:
        macros = torchrun_macros()
        assert macros.substitute(list(plan.processes[0].rank), "0")[-1] == "$$x-${local_rank}"


@pytest.mark.parametrize(
    ("setting", "gpus", "counts"),
    [
        ("gpu", (4, 4), [4, 4]),
        ("gpu", (8, 1), [8, 1]),
        ("gpu", (0, 2), [1, 2]),
        (3, (8, 0), [3, 3]),
        ((2, 5), (0, 0), [2, 5]),
    ],
)
def test_rank_count_from_gpus_number_or_list(setting: Any, gpus: tuple[int, int], counts: list[int]) -> None:
    assert ranks.nproc(JobSpec(nproc_per_node=setting), gpus) == counts


@pytest.mark.parametrize(
    ("setting", "gpus", "message"),
    [
        (2, (1, 1), "node 0 has 1 GPU, fewer than the 2 ranks"),
        ((4, 9), (4, 8), "node 1 has 8 GPUs, fewer than the 9"),
        *(((1,) * count, (1, 1), f"lists {count} nodes, the cluster has 2") for count in (0, 1, 3)),
    ],
)
def test_more_ranks_than_gpus_and_lists_of_wrong_length_are_refused(
    setting: Any, gpus: tuple[int, int], message: str
) -> None:
    hosts = [host(rank, gpus=count) for rank, count in enumerate(gpus)]
    with pytest.raises(UsageError) as caught:
        make_plans(JobSpec(nproc_per_node=setting), hosts)
    assert message in caught.value.message
    with pytest.raises(CloudDDPError):
        make_plans(JobSpec(), [])


def test_every_node_gets_the_addresses_of_all_and_the_name_of_its_interface() -> None:
    """NCCL gets an exact name, and gloo a plain one."""
    for plan in make_plans(JobSpec(), [host(0), host(1)]):
        assert (plan.env["CLOUDDDP_JOB_ID"], plan.env["CLOUDDDP_CLUSTER"]) == ("job-1", "demo")
        assert (plan.env["CLOUDDDP_NUM_NODES"], plan.env["CLOUDDDP_NODE_RANK"]) == ("2", str(plan.node))
        assert plan.env["CLOUDDDP_NODE_IPS"] == "10.0.0.1,10.0.0.2"
        assert plan.env["PYTHONFAULTHANDLER"] == "1"
        assert plan.env["NCCL_SOCKET_IFNAME"] == f"=ens{plan.node + 5}"
        assert {plan.env[f"{by}_SOCKET_IFNAME"] for by in ("GLOO", "TP")} == {f"ens{plan.node + 5}"}


def test_cpus_are_shared_among_ranks() -> None:
    plans = make_plans(JobSpec(nproc_per_node=(2, 16)), [host(0, cpus=8, gpus=0), host(1, cpus=8, gpus=0)])
    assert [plan.env["OMP_NUM_THREADS"] for plan in plans] == ["4", "1"]


@pytest.mark.parametrize(
    ("job", "seconds"),
    [(JobSpec(stop_grace=90.5, save_minutes=1), "91"), (JobSpec(), "180"), (JobSpec(max_restarts=3), "10")],
)
def test_torchrun_shutdown_timeout_is_the_longest_grace(job: JobSpec, seconds: str) -> None:
    for plan in make_plans(job, [host(0), host(1)]):
        assert plan.env["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] == seconds


def test_user_environment_overrides_ours() -> None:
    job = JobSpec(env={"NCCL_DEBUG": "INFO", "NCCL_SOCKET_IFNAME": "lo", "MINE": "1"})
    (plan,) = make_plans(job, [host(0)])
    assert (plan.env["NCCL_DEBUG"], plan.env["NCCL_SOCKET_IFNAME"], plan.env["MINE"]) == ("INFO", "lo", "1")


@pytest.mark.parametrize("rendezvous", ["c10d", "static", "direct"])
def test_user_environment_is_not_in_command_lines(rendezvous: Any) -> None:
    job = JobSpec(rendezvous=rendezvous, nproc_per_node=2, env={"TOKEN": "hunter2"})
    for plan in make_plans(job, [host(0), host(1)]):
        assert plan.env["TOKEN"] == "hunter2"
        assert "hunter2" not in json.dumps([(process.launcher, process.rank) for process in plan.processes])


def test_master_port_is_the_configured_one_or_free_on_node_zero() -> None:
    for port, expected in ((0, "40000"), (1234, "1234")):
        job = JobSpec(rendezvous="direct", nproc_per_node=1, master_port=port)
        plans = make_plans(job, [host(0), host(1)])
        assert {plan.processes[0].env["MASTER_PORT"] for plan in plans} == {expected}
