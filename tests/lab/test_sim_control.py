"""Starting, finding and stopping the simulator, also after crashes, and access to its API."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path
from urllib.parse import urlsplit

import paramiko
import pytest
from support.harness import until
from support.simlab import Laptop, execute

import cloudddp
from cloudddp.errors import CloudDDPError
from cloudddp.simulator import control
from cloudddp.simulator.linux import processes

PACKAGE = Path(cloudddp.__file__).parent


def started(code: str, *arguments: str, **more: object) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": str(PACKAGE.parent)}
    return subprocess.Popen(
        [sys.executable, "-c", code, *arguments],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **more,  # type: ignore[call-overload]
    )


def with_daemon(home: Path) -> tuple[Laptop, paramiko.SSHClient, int]:
    """Start a simulator with one node, and a process there that its SSH session does not end; return its pid,
    too."""
    laptop = Laptop(control.start(home, nodes="process"), "key")
    (instance,) = laptop.launch()
    client = laptop.connect(instance["PublicIpAddress"])
    execute(client, "setsid sh -c 'echo $$ > pid; exec sleep 3600' >/dev/null 2>&1 </dev/null &")
    return laptop, client, int(until(lambda: execute(client, "cat pid 2>/dev/null").out))


def as_nobody(code: str, *arguments: object, check: bool = True) -> subprocess.CompletedProcess[str]:
    """Run Python code as another user of this computer, who may not read the tests' environment."""
    return subprocess.run(
        ["/usr/bin/python3", "-I", "-c", code, *map(str, arguments)],
        user=65534,
        cwd="/",
        capture_output=True,
        text=True,
        timeout=300,
        check=check,
    )


def test_control_imports_no_heavy_package() -> None:
    code = "import sys, cloudddp.simulator.control; print(*sys.modules)"
    output, errors = started(code).communicate(timeout=300)
    assert "cloudddp.simulator.control" in output.split(), errors
    assert not {"moto", "asyncssh", "boto3", "botocore", "werkzeug"} & set(output.split())


def test_concurrent_starts_give_one_server_which_outlives_them(home: Path) -> None:
    assert control.find(home) is None
    assert control.stop(home) == 0
    code = (
        "import sys; from pathlib import Path; from cloudddp.simulator import control; "
        "print(control.start(Path(sys.argv[1]), nodes='process').pid)"
    )
    starters = [started(code, str(home), start_new_session=True) for _ in range(3)]
    pids = {starter.communicate(timeout=300)[0].strip() for starter in starters}
    simulator = control.find(home)
    assert simulator is not None
    assert pids == {str(simulator.pid)}
    assert len(processes.belonging(home)) == 1
    assert os.getsid(simulator.pid) == simulator.pid
    assert control.nodes(simulator) == []
    path = home / "sim" / "sim.json"
    record = json.loads(path.read_text())
    path.write_text(json.dumps({k: v for k, v in record.items() if k not in ("interfaces", "timing")}))
    assert control.find(home) == simulator, "a version without these keys has started it"
    assert control.stop(home) == 1
    assert control.find(home) is None
    with pytest.raises(CloudDDPError, match="does not respond"):
        control.nodes(simulator)


@pytest.mark.parametrize("then", ["stop", "start"])
def test_node_processes_end_after_the_server_was_killed(home: Path, then: str) -> None:
    laptop, client, pid = with_daemon(home)
    os.kill(laptop.sim.pid, signal.SIGKILL)
    until(lambda: control.find(home) is None)
    assert processes.read(pid)
    if then == "stop":
        assert control.stop(home) == 1
        assert list((home / "sim" / "nodes").iterdir()) == []
    else:
        again = control.start(home, nodes="process")
        assert again.pid != laptop.sim.pid
        assert control.nodes(again) == []
    assert processes.read(pid) is None
    client.close()


def test_reused_pid_is_not_mistaken_for_the_server(home: Path) -> None:
    simulator = control.start(home, nodes="process")
    path = home / "sim" / "sim.json"
    record = json.loads(path.read_text())
    control.stop(home)
    others = [
        subprocess.Popen(["sleep", "3600"]),
        subprocess.Popen(["sleep", "3600"], env={**os.environ, processes.HOME_MARK: str(home)}),
    ]
    try:
        unmarked, marked = map(lambda process: until(lambda: processes.read(process.pid)), others)
        path.write_text(json.dumps({**record, "pid": unmarked.pid, "ticks": unmarked.started}))
        assert control.find(home) is None
        path.write_text(json.dumps({**record, "pid": marked.pid, "ticks": record["ticks"]}))
        assert control.find(home) is None
        control.stop(home)
        assert others[0].poll() is None, "stop killed a process that is not the simulator's"
    finally:
        for process in others:
            process.kill()
            process.wait()
    assert simulator.home == home


def test_damaged_record_is_ignored(home: Path) -> None:
    (home / "sim").mkdir()
    for content in ("", "[]", "{}", '{"pid": "x", "ticks": 1}', '{"pid": 1'):
        (home / "sim" / "sim.json").write_text(content)
        assert control.find(home) is None, content


def test_port_in_use_is_reported(home: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(CloudDDPError) as error:
        port = taken.getsockname()[1]
        control.start(home, nodes="process", port=port)
    assert error.value.message.endswith(f"port {port} of 127.0.0.1 is in use")
    assert "cloudddp sim stop" in error.value.hint
    assert control.find(home) is None
    assert processes.belonging(home) == []


def test_missing_extra_is_reported(tmp_path: Path) -> None:
    shutil.copytree(PACKAGE, tmp_path / "cloudddp", ignore=shutil.ignore_patterns("__pycache__"))
    code = (
        "from pathlib import Path; from cloudddp.errors import CloudDDPError; from cloudddp.simulator import "
        "control\n"
        "try: control.start(Path('home'))\n"
        "except CloudDDPError as error: print(error.message, '|', error.hint)"
    )
    # -S: no site-packages, so neither moto nor asyncssh can be found.
    done = subprocess.run(
        [sys.executable, "-S", "-c", code], cwd=tmp_path, env={}, capture_output=True, text=True, timeout=300
    )
    assert "the simulator needs moto and asyncssh" in done.stdout, done.stderr
    assert "pip install 'cloudddp[sim]'" in done.stdout


def test_environment_is_enough_for_a_client(sim: control.Simulator) -> None:
    environment = {name: value for name, value in os.environ.items() if name not in control.HIDDEN}
    url = control.environment(sim)["CLOUDDDP_CHECKIP_URL"]
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(url, timeout=300) as answer:
        assert answer.read() == b"127.0.0.1\n"
    code = (
        "import boto3; print(boto3.client('ec2').describe_vpcs()['Vpcs'][0]['CidrBlock'])\n"
        "try: boto3.Session(profile_name='real')\n"
        "except Exception as error: print(type(error).__name__)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**environment, **control.environment(sim)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.stdout.split() == [sim.network, "ProfileNotFound"], done.stderr


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_socket_in_time_wait_grants_no_access(sim: control.Simulator) -> None:
    """A connection in TIME_WAIT shows root as its owner, and its port can be reused."""
    code = (
        "import socket, sys\n"
        "def made():\n"
        "    s = socket.socket(); s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1); return s\n"
        "server = socket.create_server(('127.0.0.1', 0))\n"
        "first = made(); first.bind(('127.0.0.1', 0)); port = first.getsockname()[1]\n"
        "first.connect(server.getsockname()); there, _ = server.accept()\n"
        "first.close(); there.recv(1); there.close()\n"
        "again = made(); again.bind(('127.0.0.1', port)); again.connect(('127.0.0.1', int(sys.argv[1])))\n"
        "again.sendall(b'GET /_cloudddp/nodes HTTP/1.0\\r\\n\\r\\n'); print(again.recv(100))\n"
    )
    done = as_nobody(code, urlsplit(sim.endpoint).port)
    assert done.stdout.strip() == "b''"


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_own_socket_on_the_same_port_grants_no_access(sim: control.Simulator) -> None:
    """Sockets of several users can share an address and port if their peers differ."""
    endpoint = urlsplit(sim.endpoint)
    with socket.socket() as ours:
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        ours.bind(("127.0.0.1", 0))
        with socket.create_server(("127.0.0.1", 0)) as elsewhere:
            ours.connect(elsewhere.getsockname())
            code = (
                "import socket, sys\n"
                "s = socket.socket(); s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)\n"
                "s.bind(('127.0.0.1', int(sys.argv[1]))); s.connect(('127.0.0.1', int(sys.argv[2])))\n"
                "s.sendall(b'GET /_cloudddp/nodes HTTP/1.0\\r\\n\\r\\n'); print(s.recv(100))\n"
            )
            done = as_nobody(code, ours.getsockname()[1], endpoint.port, check=False)
    assert "b''" in done.stdout or "Address already in use" in done.stderr


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_connections_of_others_are_closed(sim: control.Simulator) -> None:
    code = (
        "import socket, sys\n"
        "connections = []\n"
        "for _ in range(300):\n"
        "    one = socket.create_connection(('127.0.0.1', int(sys.argv[1])), 10)\n"
        "    one.settimeout(10); connections.append(one)\n"
        "def ended(one):\n"
        "    try: return one.recv(1) == b''\n"
        "    except ConnectionResetError: return True\n"
        "print(all(map(ended, connections)))\n"
    )
    done = as_nobody(code, urlsplit(sim.endpoint).port)
    assert done.stdout == "True\n"


def test_web_page_cannot_use_the_api(sim: control.Simulator) -> None:
    """Any page that the user opens may send forms to loopback addresses."""
    calls = (("/", b"Action=DescribeInstances"), ("/_cloudddp/nodes", None))
    headers = (
        {"Origin": "https://example.com"},
        {"Origin": "null"},
        {"Origin": "http://[::1"},
        {"Sec-Fetch-Site": "cross-site"},
        {"Host": "rebound.example.com"},
    )
    for (path, body), sent in itertools.product(calls, headers):
        request = urllib.request.Request(sim.endpoint + path, data=body, headers=sent)
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(request, timeout=300)
        assert refused.value.code == 403


def test_conditions_that_other_nodes_have_are_refused(sim: control.Simulator) -> None:
    for name, condition, why in (
        ("boot", {"ssh_socket": 1}, "ssh_socket has no effect on process nodes; only machine nodes have it"),
        ("link", {"latency": 0.1}, "link: it needs nodes in the lab; these are process nodes"),
    ):
        with pytest.raises(CloudDDPError, match=why):
            control.conditions(sim, {name: condition})
        assert control.conditions(sim, {})[name] == {}
