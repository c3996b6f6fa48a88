"""The systemd units that terminate a node at its deadline, checked by systemd itself where that is installed;
and host-key.sh."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import yaml
from support.harness import ROOT, cannot
from support.programs import program

from cloudddp.cluster.user_data import IDLE_CHECK, Identity, idle_files, user_data

DEADLINE = datetime(2026, 11, 20, 14, 30, 5, tzinfo=UTC)
CREATED = DEADLINE - timedelta(hours=2)

needs_systemd = pytest.mark.skipif(
    shutil.which("systemd-analyze") is None and not os.environ.get("CI"),
    reason="systemd-analyze is not installed (Debian: apt-get install systemd)",
)


def as_root(*kinds: str) -> list[str]:
    """Return what a command has to follow to run as root in new namespaces, such as `--mount`. Skip the test
    where they are refused."""
    user = () if os.getuid() == 0 else ("--user", "--map-root-user")
    words = ["unshare", *user, *kinds]
    if subprocess.run([*words, "true"], capture_output=True, check=False).returncode:
        cannot("namespaces are refused")
    return words


def units() -> dict[str, str]:
    """Return the units as cloud-init writes them on a node, by file name, with the deadline filled in."""
    config = yaml.safe_load(user_data(Identity("c", "k", "p", "q"), CREATED, DEADLINE))
    written = {}
    for command in config["bootcmd"]:
        if isinstance(command, str):
            path, text = re.fullmatch(
                r"\[ -e \S+ \] \|\| cat > (\S+) <<'END'\n(.*)\nEND", command, re.DOTALL
            ).groups()  # type: ignore[union-attr]
            written[Path(path).name] = f"{text}\n"
    return written


@needs_systemd
def test_systemd_accepts_the_units(tmp_path: Path) -> None:
    for name, text in units().items():
        (tmp_path / name).write_text(text)
    paths = [str(tmp_path / name) for name in units()]
    words = ["systemd-analyze", "verify", "--man=no", *paths]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300, check=False)
    about_ours = [line for line in done.stderr.splitlines() if "cloudddp" in line]
    assert (done.returncode, about_ours) == (0, []), done.stderr


PLAIN, DIRECT, FORCED = "--no-block poweroff", "poweroff --force --force", "poweroff --force"
# A poweroff of each kind. systemd obeys FORCED by killing every process, also those that have a poweroff left
# to try; DIRECT is done by systemctl itself, after a sync.
SYSTEMCTL = """\
#!/bin/sh
echo "$*" >> {folder}/calls
case "$*" in {hanging}) exec sleep 1000 ;; "--no-block poweroff") exit 0 ;; esac
kill -9 0
"""
SLEEP = """\
#!/bin/sh
echo "$1" >> {folder}/seconds
while [ "$(wc -l < {folder}/calls)" -lt "$(wc -l < {folder}/seconds)" ]; do sleep 0.05; done
"""


@pytest.mark.parametrize(
    ("hanging", "called", "within"),
    [
        ((), [PLAIN, DIRECT], 120),  # a unit that does not stop: systemctl has returned at once
        ((PLAIN,), [PLAIN, DIRECT], 120),  # systemd does not answer
        ((PLAIN, DIRECT), [PLAIN, DIRECT, FORCED], 150),  # a sync waits for a mount whose server is gone
    ],
    ids=["a unit does not stop", "systemd hangs", "a mount hangs"],
)
def test_poweroff_that_hangs_leads_to_the_next_one(
    tmp_path: Path, hanging: tuple[str, ...], called: list[str], within: int
) -> None:
    """Runs the commands of the service one after the other, as systemd does, with a systemctl that hangs.
    Without default dependencies it does not conflict with shutdown.target: it has to run until the power is
    off."""
    service = units()["cloudddp-deadline.service"].splitlines()
    assert "DefaultDependencies=no" in service
    pattern = "|".join(f'"{one}"' for one in hanging) or '""'
    commands = ""
    (tmp_path / "calls").touch()
    for name, text in (("systemctl", SYSTEMCTL), ("sleep", SLEEP)):
        program(tmp_path / name, text.format(folder=tmp_path, hanging=pattern))
    for line in service:
        if line.startswith("ExecStart="):
            command = line.split("=", 1)[1].lstrip("-")
            commands += re.sub(r"/bin/(systemctl|sleep)\b", rf"{tmp_path}/\1", command) + "\n"
    process = subprocess.Popen(["sh", "-c", commands], start_new_session=True)
    try:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(20)
        assert (tmp_path / "calls").read_text().splitlines() == called
        waits = (tmp_path / "seconds").read_text().split()
        assert sum(map(int, waits[: len(called) - 1])) == within
        assert process.poll() == -signal.SIGKILL, "nothing has powered the node off"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


# -- when a node ends (infra/node/cloudddp-idle.sh), in a process namespace where nothing else runs ----------


ALONE = ("--pid", "--fork", "--kill-child", "--mount-proc")
IDLE = 300  # seconds
AGENT, WRAPPER = "cloudddp-job", "cloudddp-rank"
USER, LOGIN = "sshd: ubuntu@pts/0", "sshd: ubuntu [priv]"
NOW, VANISHED = "lastsnd:4 lastrcv:4 lastack:4", "lastsnd:4 lastrcv:400000 lastack:400000"
PLAN = '{"job": "j", "seconds": 60.0}'


@dataclass(frozen=True)
class Unused:
    """A node that was last used so many seconds ago, by a job and by a client; None: it has just booted.
    `clients`: the titles of sshd's processes, each with a connection as `ss -i` prints it. `task`: the mark
    of a process of a job."""

    ago: tuple[int, int] | None = (400, 400)
    plan: str | None = None
    is_new: bool = False  # the plan was written since the last look
    names: tuple[str, ...] = ()
    clients: tuple[tuple[str, str], ...] = ()
    task: str = ""
    verdict: bool = False
    mark: bool = False  # the node was ending already


@pytest.mark.parametrize(
    ("node", "ends"),
    [
        (Unused(), True),
        (Unused((100, 100)), False),
        (Unused((400, 100)), False),
        (Unused(None), False),  # the clock of a boot begins anew
        # jobs
        (Unused(names=(AGENT,)), False),
        (Unused(names=(AGENT,), plan='{"job": "j", "seconds": 0.0}'), False),
        (Unused(task="j/0"), True),
        (Unused(task="j/0", names=(WRAPPER,)), False),  # a rank that has lost its agents saves
        (Unused(task="j/0", names=(AGENT,)), False),
        (Unused(task="j/0", verdict=True), True),
        (Unused((1100, 1100), task="j/0", names=(WRAPPER,)), True),
        (Unused(task="j/0/setup"), True),  # what a setup has left in the background
        (Unused(names=("cloudddp-setup",)), True),  # its client is gone
        # the plan of a job with --down
        (Unused((50, 50), plan=PLAN), False),
        (Unused((100, 100), plan=PLAN), True),
        (Unused((5, 5), plan='{"job": "j", "seconds": 0.0}'), True),
        (Unused((400, 400), plan='{"job": "j", "seconds": 3000.0, "clients": 1}'), False),
        (Unused((100, 5), plan=PLAN), False),
        (Unused((4000, 5), plan=PLAN), True),  # clients prolong it by an hour
        (Unused((4000, 5), plan=PLAN[:-1] + ', "clients": 5000.0}'), False),  # nodes are being replaced
        (Unused((5000, 5)), False),  # and without a plan, for ever
        (Unused((100, 100), plan=PLAN, is_new=True), False),
        (Unused((100, 100), plan='{"job": "j", "seconds": -60.0}'), False),
        (Unused((100, 100), plan='{"job": "j", "seconds": 6e-06}'), True),
        (Unused((100, 100), plan="no JSON"), False),
        (Unused((100, 100), plan=" " * 1000 + PLAN), False),  # of a huge file
        (Unused((100, 100), plan="link"), False),
        (Unused((100, 100), plan="pipe"), False),
        # clients
        (Unused(clients=((USER, NOW),)), False),
        (Unused(clients=(("sshd: ubuntu", NOW),)), False),
        (Unused(clients=(("sshd-session: ubuntu@notty", NOW),)), False),  # OpenSSH 9.8
        (Unused(clients=((LOGIN, NOW),)), True),  # nobody has logged in
        (Unused(clients=(("sshd: unknown [net]", NOW), ("sshd: /usr/sbin/sshd -D [listener] 0", NOW))), True),
        (Unused(clients=((USER, VANISHED),)), True),
        (Unused(clients=((USER, VANISHED), (LOGIN, NOW))), True),
        (Unused(clients=((USER, VANISHED), (USER, NOW))), False),
        (Unused(clients=((USER, "lastrcv:400000 lastack:4"),)), False),  # it shows what a program prints
        (Unused(clients=((USER, "lastrcv:200000 lastack:200000"),)), False),  # idle for less than the grace
        (Unused((70, 5), plan='{"job": "j", "seconds": 0.0}', clients=((USER, "lastrcv:40000"),)), False),
        (Unused(names=("ssm-session-worker",)), False),  # the kernel keeps 15 characters of it
        (Unused(names=("login",)), False),  # on a console; systems without utmp do not list it in `who`
        (Unused(names=("agetty", "amazon-ssm-agent")), True),
        # the last second
        (Unused((1, 1), mark=True), True),  # the shutdown that has begun is tried again
        (Unused(names=(AGENT,), mark=True), False),
    ],
    ids=str,
)
def test_unused_node_ends(tmp_path: Path, node: Unused, ends: bool) -> None:
    assert look(tmp_path, node) is ends
    assert (tmp_path / "cloudddp-ending").exists() is ends
    killed = bool(node.task) and not (tmp_path / "remaining").read_text()
    assert killed is (node.task == "j/0" and ends)


def look(folder: Path, node: Unused) -> bool:
    """Let the timer look once; return whether it ends the node."""
    (text,) = [file["content"] for file in idle_files(IDLE / 60, 1) if file["path"] == IDLE_CHECK]
    for path, other in (("/run/", f"{folder}/"), ("/home/*", f"{folder}/home/*"), ("/root", "/none")):
        text = text.replace(path, other)
    (folder / "idle.sh").write_text(text)
    store = folder / "home" / "user" / ".cloudddp"
    (store / "jobs" / "j").mkdir(parents=True)
    if node.verdict:
        (store / "jobs" / "j" / "verdict.json").touch()
    (folder / "target").write_text('{"job": "j", "seconds": 0.0}')
    if node.plan == "pipe":
        os.mkfifo(store / "poweroff.json")
    elif node.plan == "link":
        (store / "poweroff.json").symlink_to(folder / "target")
    elif node.plan is not None:
        (store / "poweroff.json").write_text(node.plan)
    if node.ago is not None:
        read = "" if node.is_new or node.plan in (None, "link", "pipe") else (node.plan or "")[:1000]
        key = subprocess.run("cksum", input=read, capture_output=True, text=True, check=True).stdout
        uptime = int(float(Path("/proc/uptime").read_text().split()[0]))
        words = [uptime - min(node.ago), *(uptime - one for one in node.ago), key.strip().replace(" ", "")]
        (folder / "cloudddp-unused").write_text(" ".join(map(str, words)) + "\n")
    if node.mark:
        (folder / "cloudddp-ending").touch()
    program(folder / "systemctl", f'echo "$@" >> {folder}/calls')
    program(folder / "ss", f"cat {folder}/connections")
    shown = folder / "connections"
    lines = ["set -e", f"PATH={folder}:$PATH", f": > {folder}/connections"]
    for name in (*node.names, *(["left"] if node.task else [])):
        shutil.copy("/bin/sleep", folder / name)
        mark = f"CLOUDDDP_TASK={node.task}" if name == "left" else ""
        ready = f"until [ /proc/$!/exe -ef {folder}/{name} ]; do sleep 0.02; done"
        lines += [f"env {mark} {name} 60 &", ready]
    for number, (title, info) in enumerate(node.clients):
        lines += [
            f"bash -c 'exec -a \"{title}\" sleep 60' &",
            "until grep -q ^sshd /proc/$!/cmdline; do sleep 0.02; done",
            f'printf "0 0 10.0.0.4:22 10.0.0.9:{number} users:((\\"sshd\\",pid=%s,fd=4))\\n" $! >> {shown}',
            f'printf "\\t cubic {info} rcv_rtt:1\\n" >> {shown}',
        ]
    lines += [f"sh {folder}/idle.sh", f"pgrep -x left > {folder}/remaining || :"]
    words = [*as_root(*ALONE), "sh", "-c", "\n".join(lines)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300, check=True)
    assert done.stderr == ""
    calls = folder / "calls"
    return calls.exists() and calls.read_text() == "start --no-block cloudddp-deadline.service\n"


# -- host-key.sh on a real /etc/ssh, in a mount namespace of its own -----------------------------------------


SCRIPT = ROOT / "infra" / "node" / "host-key.sh"


@pytest.mark.parametrize(
    ("active", "code", "expected"),
    [
        (("ssh",), 0, ["reload ssh"]),
        (("ssh",), 1, ["reload ssh"]),  # the laptop checks the key
        (("sshd",), 0, ["reload sshd"]),  # Amazon Linux
        # systemd may wait 90 s for a reload of a sshd that a socket has started: it cannot bind its address.
        (("ssh", "ssh.socket"), 0, ["stop ssh.service"]),
        (("sshd.socket",), 1, ["stop sshd.service"]),  # one sshd for each connection: nothing to stop
        ((), 0, []),
    ],
)
def test_sshd_uses_the_new_key(
    tmp_path: Path, active: tuple[str, ...], code: int, expected: list[str]
) -> None:
    alone = as_root("--mount")
    folder, programs = tmp_path / "ssh", tmp_path / "bin"
    folder.mkdir()
    program(
        programs / "systemctl",
        f"if [ $1 = is-active ]; then for unit in {' '.join(active)}; do\n"
        f'[ $3 != $unit ] || exit 0; done; exit 3; fi\necho "$*" >> {tmp_path}/calls; exit {code}',
    )
    subprocess.run(
        ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "", "-f", folder / "ssh_host_ed25519_key"],
        check=True,
    )

    def step(name: str, key: str) -> subprocess.CompletedProcess[str]:
        inside = f'mount --bind {folder} /etc/ssh && PATH={programs}:$PATH sh {SCRIPT} "$@"'
        return subprocess.run(
            [*alone, "sh", "-c", inside, "sh", name, key], capture_output=True, text=True, timeout=300
        )

    old = " ".join((folder / "ssh_host_ed25519_key.pub").read_text().split()[:2])
    new = step("make-host-key", old).stdout.strip()
    done = step("install-host-key", new)
    assert (done.returncode, done.stderr) == (0, "")
    assert (folder / "ssh_host_ed25519_key.pub").read_text().strip() == new != old
    calls = tmp_path / "calls"
    assert (calls.read_text().splitlines() if calls.exists() else []) == expected
