"""What each node starts for a job: argv, environment and rendezvous, from plain values."""

from __future__ import annotations

import json
from typing import Any

import pytest

from cloudddp import ranks
from cloudddp.errors import CloudDDPError, UsageError
from cloudddp.ranks import RANK_WRAPPER, Host, NodePlan, Script
from cloudddp.spec import JobSpec

SCRIPT = Script("train.py", ("--epochs", "3"))
STAND_IN_ENVIRONMENT = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "NODE_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
)


def host(rank: int, **changes: Any) -> Host:
    values: dict[str, Any] = {
        "rank": rank,
        "private_ip": f"10.0.0.{rank + 1}",
        "interface": f"ens{rank + 5}",
        "gpus": 4,
        "cpus": 8,
        "python": f"/py{rank}",
        "free_port": 40000 + rank,
    }
    return Host(**{**values, **changes})


def planned(job: JobSpec, hosts: list[Host], script: Script = SCRIPT) -> list[NodePlan]:
    return ranks.plan(job, hosts, script, job_id="job-1", cluster="demo")


def after(argv: tuple[str, ...]) -> list[str]:
    """What the rank itself runs."""
    return list(argv[argv.index(RANK_WRAPPER) + 1 :])


def test_c10d_gives_every_node_the_same_meeting_point_and_says_who_hosts_it() -> None:
    plans = planned(JobSpec(nproc_per_node=2), [host(0), host(1)])
    for plan in plans:
        (process,) = plan.processes
        assert process.argv[:3] == (f"/py{plan.node}", "-m", "torch.distributed.run")
        assert {"--nnodes=2", "--nproc-per-node=2", "--max-restarts=0"} <= set(process.argv)
        assert f"--local-addr=10.0.0.{plan.node + 1}" in process.argv
        assert {"--rdzv-backend=c10d", "--rdzv-id=job-1", "--rdzv-endpoint=10.0.0.1:40000"} <= set(
            process.argv
        )
        assert f"--rdzv-conf=is_host={'true' if plan.node == 0 else 'false'}" in process.argv
        assert not any(word.startswith(("--node-rank", "--master")) for word in process.argv)
        assert process.argv[process.argv.index(RANK_WRAPPER) - 1] == "--no-python"
        assert after(process.argv) == [f"/py{plan.node}", "train.py", "--epochs", "3"]
        assert not set(STAND_IN_ENVIRONMENT) & ({*plan.env} | {*process.env})


def test_static_numbers_the_nodes_and_names_the_master() -> None:
    plans = planned(
        JobSpec(nproc_per_node=1, rendezvous="static", master_port=29400), [host(k) for k in range(3)]
    )
    for plan in plans:
        (process,) = plan.processes
        assert {f"--node-rank={plan.node}", "--master-addr=10.0.0.1", "--master-port=29400"} <= set(
            process.argv
        )
        assert f"--local-addr=10.0.0.{plan.node + 1}" in process.argv
        assert not any(word.startswith("--rdzv") for word in process.argv)
        assert after(process.argv)[1:] == ["train.py", "--epochs", "3"]


def test_torchrun_counts_the_ranks_of_its_own_node_and_gets_the_restarts() -> None:
    plans = planned(JobSpec(nproc_per_node=(3, 1), max_restarts=2), [host(0), host(1)])
    assert [plan.ranks for plan in plans] == [3, 1]
    for plan, count in zip(plans, (3, 1), strict=True):
        assert {f"--nproc-per-node={count}", "--max-restarts=2"} <= set(plan.processes[0].argv)
        assert len(plan.processes) == 1


def test_direct_ranks_get_everything_that_env_rendezvous_reads() -> None:
    plans = planned(JobSpec(nproc_per_node=2, rendezvous="direct"), [host(0), host(1)])
    found = [process for plan in plans for process in plan.processes]
    assert [process.env for process in found] == [
        {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank % 2),
            "WORLD_SIZE": "4",
            "LOCAL_WORLD_SIZE": "2",
            "GROUP_RANK": str(rank // 2),
            "NODE_RANK": str(rank // 2),
            "MASTER_ADDR": "10.0.0.1",
            "MASTER_PORT": "40000",
        }
        for rank in range(4)
    ]
    for rank, process in enumerate(found):
        assert list(process.argv) == [RANK_WRAPPER, f"/py{rank // 2}", "train.py", "--epochs", "3"]


def test_ranks_of_unequal_nodes_are_numbered_by_the_sum_of_those_before() -> None:
    counts = (1, 3, 2)
    plans = planned(JobSpec(nproc_per_node=counts, rendezvous="direct"), [host(k) for k in range(3)])
    numbers = [[int(process.env["RANK"]) for process in plan.processes] for plan in plans]
    assert numbers == [[0], [1, 2, 3], [4, 5]]
    assert [plan.processes[0].env["LOCAL_WORLD_SIZE"] for plan in plans] == [
        "1",
        "3",
        "2",
    ]
    assert {process.env["WORLD_SIZE"] for plan in plans for process in plan.processes} == {"6"}


def test_positional_ranks_come_after_the_scripts_own_arguments() -> None:
    job = JobSpec(nproc_per_node=(1, 2), rendezvous="direct", positional_ranks=True)
    plans = planned(job, [host(0), host(1)])
    assert [after(process.argv)[1:] for plan in plans for process in plan.processes] == [
        ["train.py", "--epochs", "3", "0", "0"],
        ["train.py", "--epochs", "3", "1", "0"],
        ["train.py", "--epochs", "3", "2", "1"],
    ]


@pytest.mark.parametrize("rendezvous", ["c10d", "static"])
def test_positional_ranks_under_torchrun_are_refused(rendezvous: Any) -> None:
    with pytest.raises(UsageError, match="positional_ranks"):
        planned(JobSpec(rendezvous=rendezvous, positional_ranks=True), [host(0)])


@pytest.mark.parametrize("rendezvous", ["c10d", "static", "direct"])
def test_a_module_is_run_with_m(rendezvous: Any) -> None:
    job = JobSpec(nproc_per_node=1, rendezvous=rendezvous)
    (plan,) = planned(job, [host(0)], Script("pkg.train", ("-x",), module=True))
    assert after(plan.processes[0].argv) == ["/py0", "-m", "pkg.train", "-x"]


@pytest.mark.parametrize(
    ("wanted", "gpus", "counts"),
    [
        ("gpu", (4, 4), [4, 4]),
        ("gpu", (8, 1), [8, 1]),
        ("gpu", (0, 2), [1, 2]),
        (3, (8, 0), [3, 3]),
        ((2, 5), (0, 0), [2, 5]),
    ],
)
def test_the_number_of_ranks_comes_from_the_gpus_a_number_or_a_list(
    wanted: Any, gpus: tuple[int, int], counts: list[int]
) -> None:
    assert ranks.nproc(JobSpec(nproc_per_node=wanted), gpus) == counts


@pytest.mark.parametrize(
    ("wanted", "gpus", "said"),
    [
        (2, (1, 1), "node 0 has 1 GPU, fewer than the 2 ranks"),
        ((4, 9), (4, 8), "node 1 has 8 GPUs, fewer than the 9"),
    ],
)
def test_more_ranks_than_gpus_are_refused_with_both_numbers(
    wanted: Any, gpus: tuple[int, int], said: str
) -> None:
    with pytest.raises(UsageError) as caught:
        ranks.nproc(JobSpec(nproc_per_node=wanted), gpus)
    assert said in caught.value.message


@pytest.mark.parametrize("listed", [(), (1,), (1, 1, 1)])
def test_a_list_that_does_not_fit_the_nodes_is_refused_with_both_numbers(listed: tuple[int, ...]) -> None:
    with pytest.raises(UsageError) as caught:
        planned(JobSpec(nproc_per_node=listed), [host(0), host(1)])
    assert f"lists {len(listed)} nodes" in caught.value.message
    assert "has 2" in caught.value.message


def test_a_job_without_nodes_is_refused() -> None:
    with pytest.raises(CloudDDPError):
        planned(JobSpec(), [])


def test_nccl_gets_the_exact_interface_and_gloo_the_bare_name_of_each_node() -> None:
    for plan in planned(JobSpec(), [host(0), host(1)]):
        assert plan.env["NCCL_SOCKET_IFNAME"] == f"=ens{plan.node + 5}"
        assert plan.env["GLOO_SOCKET_IFNAME"] == f"ens{plan.node + 5}"


def test_the_processors_of_a_node_are_shared_among_its_ranks() -> None:
    plans = planned(JobSpec(nproc_per_node=(2, 16)), [host(0, cpus=8, gpus=0), host(1, cpus=8, gpus=0)])
    assert [plan.env["OMP_NUM_THREADS"] for plan in plans] == ["4", "1"]


def test_torchrun_lets_its_ranks_save_as_long_as_the_agent_does() -> None:
    for plan in planned(JobSpec(stop_grace=90.5), [host(0), host(1)]):
        assert plan.env["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] == "91"


def test_ranks_can_learn_of_the_job_and_its_nodes() -> None:
    for plan in planned(JobSpec(), [host(0), host(1)]):
        assert plan.env["CLOUDDDP_JOB_ID"] == "job-1"
        assert plan.env["CLOUDDDP_CLUSTER"] == "demo"
        assert plan.env["CLOUDDDP_NUM_NODES"] == "2"
        assert plan.env["CLOUDDDP_NODE_RANK"] == str(plan.node)
        assert plan.env["CLOUDDDP_NODE_IPS"] == "10.0.0.1,10.0.0.2"


def test_a_variable_of_the_users_wins_over_ours() -> None:
    job = JobSpec(env={"NCCL_DEBUG": "INFO", "NCCL_SOCKET_IFNAME": "lo", "MINE": "1"})
    (plan,) = planned(job, [host(0)])
    assert (plan.env["NCCL_DEBUG"], plan.env["NCCL_SOCKET_IFNAME"], plan.env["MINE"]) == ("INFO", "lo", "1")


@pytest.mark.parametrize("rendezvous", ["c10d", "static", "direct"])
def test_values_of_the_users_variables_are_in_no_command_line(rendezvous: Any) -> None:
    job = JobSpec(rendezvous=rendezvous, nproc_per_node=2, env={"TOKEN": "hunter2"})
    for plan in planned(job, [host(0), host(1)]):
        assert plan.env["TOKEN"] == "hunter2"
        assert "hunter2" not in json.dumps([process.argv for process in plan.processes])


def test_a_chosen_port_is_taken_and_none_means_one_that_is_free_on_node_zero() -> None:
    for port, expected in ((0, "40000"), (1234, "1234")):
        job = JobSpec(rendezvous="direct", nproc_per_node=1, master_port=port)
        assert {plan.processes[0].env["MASTER_PORT"] for plan in planned(job, [host(0), host(1)])} == {
            expected
        }


def test_a_plan_survives_json() -> None:
    for plan in planned(JobSpec(nproc_per_node=2, rendezvous="direct"), [host(0), host(1)]):
        read = json.loads(json.dumps(plan.to_json()))
        assert (read["node"], read["ranks"], read["env"]) == (plan.node, plan.ranks, plan.env)
        assert [tuple(p["argv"]) for p in read["processes"]] == [p.argv for p in plan.processes]
        assert [p["env"] for p in read["processes"]] == [p.env for p in plan.processes]
