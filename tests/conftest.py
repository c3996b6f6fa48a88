"""Shared fixtures: a simulator for each worker, the command line that uses it, a faulty endpoint."""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from support import simulators
from support.account import post_conditions
from support.faults import FaultyEndpoint
from support.harness import TIMEOUT, CommandLine, Remains, clean_environment, remaining
from support.pool import Pool
from support.simlab import client_of
from support.skips import Failures, Skips, select_slow_and_skipped
from support.terminal import Terminal
from support.tiers import is_slow, mark_slow_tests

from cloudddp.simulator.ec2.speed import data_files_parsed_once

# Settings of the interpreter that a developer may have: without byte code each of thousands of processes
# compiles what it imports, and unbuffered output behaves in another way when a disk is full.
for _name in [name for name in os.environ if name.startswith("PYTHON") and name != "PYTHONPATH"]:
    del os.environ[_name]
sys.dont_write_bytecode = False
# A shell that runs the tests in the background has Ctrl-C ignored, and nohup the end of a terminal, which
# every child would inherit.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

# The same examples on every run, and no deadlines: machines are shared.
settings.register_profile(
    "cloudddp", derandomize=True, deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("cloudddp")

LONGEST_ID = 60  # characters of one parameter


def pytest_make_parametrize_id(val: object) -> str | None:
    """Shorten long texts, which pytest-xdist sends to each worker as a part of the test's id."""
    if not isinstance(val, str | bytes) or len(val) <= LONGEST_ID:
        return None
    start = val[:LONGEST_ID] if isinstance(val, str) else val[:LONGEST_ID].decode("latin-1")
    return f"{start.encode('unicode_escape').decode()}...{len(val)}"


def pytest_configure(config: pytest.Config) -> None:
    if hasattr(config, "workerinput"):
        return
    config.pluginmanager.register(Failures())
    if file := os.environ.get("TEST_SKIPS"):
        config.pluginmanager.register(Skips(Path(file)))


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Skip files without a test of `make test` there: their imports take seconds of each process."""
    return True if config.option.markexpr == "not slow" and is_slow(collection_path) else None


@pytest.hookimpl(tryfirst=True)  # before xdist and `-m` read the marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark slow tests. Assign those that share a module-scoped fixture to one worker."""
    mark_slow_tests(items)
    if file := os.environ.get("TEST_SKIPPED"):
        select_slow_and_skipped(config, items, Path(file))
    for item in items:
        if not isinstance(item, pytest.Function) or item.get_closest_marker("xdist_group"):
            continue
        found = item._fixtureinfo.name2fixturedefs
        shared = [name for name, fixtures in found.items() if fixtures[-1].scope == "module"]
        if shared:
            chosen = item.callspec.indices if hasattr(item, "callspec") else {}
            parts = [item.path.stem, *(str(chosen[name]) for name in shared if name in chosen)]
            item.add_marker(pytest.mark.xdist_group("-".join(parts)))


def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()  # thousands of permanent objects, which later collections skip


@pytest.fixture(scope="session", autouse=True)
def no_simulator_is_left(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[None]:
    """Fail if a test has not stopped its simulator; stop those of tests that were interrupted."""
    base = tmp_path_factory.getbasetemp()
    watcher = simulators.stop_after_this_process(base)
    yield
    if request.session.exitstatus == pytest.ExitCode.INTERRUPTED:
        return  # the tear-down may be incomplete: the watcher does the rest when this process has ended
    watcher.kill()
    watcher.communicate()
    left = simulators.running(base)
    if left:
        simulators.stop(str(base))
    assert left == []


@pytest.fixture(scope="session", autouse=True)
def parsed_models() -> Iterator[None]:
    """EC2's model is 3 MB, and every boto3 session would parse it again."""
    with data_files_parsed_once():
        yield


@pytest.fixture(scope="session")
def simulator(tmp_path_factory: pytest.TempPathFactory, no_simulator_is_left: None) -> Iterator[Any]:
    """One simulator for all tests of a worker; they use different cluster names."""
    pytest.importorskip("moto", reason="the simulator needs the extra `sim`")
    pytest.importorskip("asyncssh", reason="the simulator needs the extra `sim`")
    from cloudddp.simulator import control

    home = tmp_path_factory.mktemp("home")
    found = control.start(home, nodes="process", timeout=TIMEOUT)
    yield found
    control.stop(home)


@pytest.fixture(scope="session")
def pool(simulator: Any) -> Pool:
    return Pool(simulator)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    folder = tmp_path / "project"
    folder.mkdir()
    return folder


@pytest.fixture
def here(tmp_path: Path) -> Path:
    """A folder of files on this computer."""
    folder = tmp_path / "here"
    folder.mkdir()
    return folder


@pytest.fixture(scope="session")
def ec2(simulator: Any) -> Any:
    """Plain boto3 connected to the simulator, independent of cloudddp's own code."""
    return client_of(simulator, "ec2")


@pytest.fixture
def cli(
    simulator: Any, pool: Pool, ec2: Any, project: Path, request: pytest.FixtureRequest
) -> Iterator[CommandLine]:
    """The command line against the simulator; the test's cluster is then kept for another test or removed."""
    from cloudddp.simulator import control

    cluster = f"t{abs(hash(request.node.nodeid)) % 10**9}"
    env = clean_environment(
        CLOUDDDP_HOME=str(simulator.home),
        CLOUDDDP_CLUSTER=cluster,
        CLOUDDDP_YES="1",
        **control.environment(simulator),
    )
    line = CommandLine(project, cluster, env, pool)
    yield line
    line.end()
    if not line.give_back():
        line.remove(ec2, AWS_ENDPOINT_URL=simulator.endpoint)


@pytest.fixture
def line(tmp_path: Path, project: Path) -> Iterator[CommandLine]:
    """The command line without any endpoint."""
    made = CommandLine(project, "none", clean_environment(CLOUDDDP_HOME=str(tmp_path / "home")))
    yield made
    made.end()


@pytest.fixture
def ssh_site(tmp_path: Path) -> Iterator[Any]:
    """Keys of a cluster, and SSH servers that accept them."""
    pytest.importorskip("asyncssh", reason="the simulator needs the extra `sim`")
    from support.sshserver import site

    with site(tmp_path) as created:
        yield created


@pytest.fixture
def terminal(cli: CommandLine) -> Iterator[Callable[..., Terminal]]:
    """Return a function that runs a command on a terminal of its own, which is ended after the test."""
    opened: list[Terminal] = []

    def open_one(*words: str) -> Terminal:
        opened.append(Terminal(cli, *words))
        return opened[-1]

    yield open_one
    for one in opened:
        one.process.kill()
        one.process.wait()


@pytest.fixture
def faults(simulator: Any, cli: CommandLine) -> Iterator[FaultyEndpoint]:
    """An endpoint in front of the simulator that counts calls and fails on request; `cli` uses it."""
    with FaultyEndpoint(simulator.endpoint) as endpoint:
        cli.env["AWS_ENDPOINT_URL"] = endpoint.url
        yield endpoint


@pytest.fixture
def remains(ec2: Any, cli: CommandLine) -> Callable[[], Remains]:
    return lambda: remaining(ec2, cli.cluster)


@pytest.fixture
def conditions(simulator: Any, cli: CommandLine) -> Iterator[Callable[..., dict[str, Any]]]:
    """Set the simulator's conditions, return all; they are cleared before `cli` removes nodes."""

    def post(**body: Any) -> dict[str, Any]:
        status, answer = post_conditions(simulator.endpoint, body)
        assert status == 200, answer
        return answer

    yield post
    post(clear=True)


@pytest.fixture(scope="module")
def removals(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A simulator whose instances never boot and end at once, for tests without nodes."""
    pytest.importorskip("moto", reason="the simulator needs the extra `sim`")
    pytest.importorskip("asyncssh", reason="the simulator needs the extra `sim`")
    from cloudddp.simulator import control

    home = tmp_path_factory.mktemp("account")
    timing = {"booting": 3600.0, "shutting-down": 0.15}
    yield control.start(home, nodes="process", timing=timing, timeout=TIMEOUT)
    control.stop(home)


@pytest.fixture
def account(removals: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The resources of one cluster, which `up` creates and `down` removes in this process."""
    from support.teardown_account import Account

    from cloudddp.aws.client import AWS

    with FaultyEndpoint(removals.endpoint) as faults:
        for name, value in {
            "AWS_ENDPOINT_URL": faults.url,
            "AWS_ACCESS_KEY_ID": "x",
            "AWS_SECRET_ACCESS_KEY": "x",
            "CLOUDDDP_HOME": str(tmp_path / "home"),
        }.items():
            monkeypatch.setenv(name, value)
        monkeypatch.delenv("AWS_PROFILE", raising=False)
        made = Account(removals, faults, AWS(region=removals.region))
        yield made
        made.conditions(clear=True)


@pytest.fixture
def other_region(simulator: Any, cli: CommandLine) -> Iterator[Any]:
    """EC2 in us-west-2; the test's end removes the cluster there."""
    client = client_of(simulator, "ec2", region_name="us-west-2")
    yield client
    assert cli.remove(client, "--region", "us-west-2") == 0
