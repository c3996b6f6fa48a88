"""What a node more costs: `up`, a direct `launch`, `exec` and `down` of 1 to 64 namespace nodes, and more without hosts.

`python -m bench scale` starts a simulator and runs this file in its network with `cloudddp sim exec`. Of each command:
seconds; calls of the AWS API, counted by a proxy in front of it; bytes to and from the nodes; and of its process, the largest
number of threads and the peak of its memory, read from /proc every few milliseconds.
"""

from __future__ import annotations

import argparse
import http.server
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # also run as a file

from bench import traffic
from bench.common import ROOT, environment, replace_between, script, simulator
from bench.train import figures
from cloudddp.config.spec.cluster import MAX_NODES

NODES = (1, 2, 4, 8, 16, 32, 64)
API_NODES = min(256, MAX_NODES)  # without hosts
RUNS = 3  # of launch and exec; their medians
VERBS = ("up", "launch", "exec", "down")
_MEASURES = {"seconds": "seconds", "calls": "AWS calls", "kilobytes": "kB over SSH", "threads": "threads",
             "megabytes": "MB of memory"}  # fmt: skip
_SAMPLE = 0.004  # seconds
_SCRIPT = "print('one line')\n"


@dataclass(frozen=True, slots=True)
class Cost:
    """Of one command. `kilobytes` are those to and from the nodes; 0 where there are none."""

    seconds: float
    calls: int
    kilobytes: float
    threads: int
    megabytes: float


class CountingProxy:
    """Forwards API calls, and counts them."""

    def __init__(self, upstream: str) -> None:
        self.calls = 0
        lock = threading.Lock()
        proxy = self
        opener = urllib.request.build_opener(
            urllib.request.ProxyHandler({})
        )  # none, whatever the environment has

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                with lock:
                    proxy.calls += 1
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                skipped = ("host", "content-length", "connection", "accept-encoding")
                headers = {name: value for name, value in self.headers.items() if name.lower() not in skipped}
                request = urllib.request.Request(upstream + self.path, body, headers)  # noqa: S310  our own
                try:
                    with opener.open(request, timeout=120) as answer:
                        status, kind, text = answer.status, answer.headers["Content-Type"], answer.read()
                except urllib.error.HTTPError as error:
                    status, kind, text = error.code, error.headers["Content-Type"], error.read()
                self.send_response(status)
                self.send_header("Content-Type", kind or "text/xml")
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)

            def log_message(self, *_: Any) -> None:
                """Silent."""

        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        server.daemon_threads = True
        self.url = f"http://127.0.0.1:{server.server_address[1]}"
        threading.Thread(target=server.serve_forever, daemon=True).start()


class Measuring:
    """Runs commands of one cluster in a folder of its own."""

    def __init__(
        self, name: str, endpoint: str, env: dict[str, str], folder: Path, *, bytes_too: bool
    ) -> None:
        self._proxy = CountingProxy(endpoint)
        more = {"CLOUDDDP_CLUSTER": name, "CLOUDDDP_YES": "1", "CLOUDDDP_RENDEZVOUS": "direct",
                "CLOUDDDP_NPROC_PER_NODE": "1", "AWS_ENDPOINT_URL": self._proxy.url}  # fmt: skip
        self._env = {**env, **more}
        self._folder = folder
        self._bytes_too = bytes_too
        (folder / "line.py").write_text(_SCRIPT)

    def run(self, *words: str, until: str = "") -> Cost:
        """Run a command to its end; with `until`, to the first line with this text, at which it is killed."""
        calls, moved = self._proxy.calls, self._moved()
        threads, peak = 0, 0
        with tempfile.TemporaryFile() as output:
            began = time.perf_counter()
            process = subprocess.Popen(
                [script("cloudddp"), *words], env=self._env, cwd=self._folder, stdin=subprocess.DEVNULL,
                stdout=output, stderr=subprocess.STDOUT,
            )  # fmt: skip
            stopped = False
            while process.poll() is None:
                threads, peak = map(max, zip((threads, peak), _threads_and_peak(process.pid), strict=True))
                if until and until.encode() in os.pread(output.fileno(), 1 << 20, 0):
                    stopped = True
                    process.kill()
                    process.wait()
                    break
                time.sleep(_SAMPLE)
            seconds = time.perf_counter() - began
            if process.returncode and not stopped:
                text = os.pread(output.fileno(), 1 << 20, 0).decode(errors="replace")
                raise SystemExit(f"cloudddp {' '.join(words)}: exit {process.returncode}\n{text}")
        moved = self._moved() - moved
        return Cost(seconds, self._proxy.calls - calls, moved / 1e3, threads, peak / 1e3)

    def _moved(self) -> int:
        return traffic.sent() + traffic.received() if self._bytes_too else 0


def _threads_and_peak(pid: int) -> tuple[int, int]:
    """Return the number of threads, and the peak of the memory in kB; zeros for a process that has ended."""
    try:
        text = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0, 0
    values = dict(line.split(":", 1) for line in text.splitlines())
    return int(values.get("Threads", "0")), int(values.get("VmHWM", "0 kB").split()[0])


def median(costs: Sequence[Cost]) -> Cost:
    """Return the medians of seconds and bytes, and the largest of what is a peak."""
    return Cost(
        seconds=statistics.median(one.seconds for one in costs),
        calls=max(one.calls for one in costs),
        kilobytes=statistics.median(one.kilobytes for one in costs),
        threads=max(one.threads for one in costs),
        megabytes=max(one.megabytes for one in costs),
    )


def rows(nodes: Sequence[int]) -> Iterator[dict[str, Any]]:
    """Yield a row per number of nodes. In the simulator's network."""
    traffic.count()
    for count in nodes:
        with tempfile.TemporaryDirectory(prefix="scale-") as folder:
            measuring = Measuring(
                f"n{count}", os.environ["AWS_ENDPOINT_URL"], dict(os.environ), Path(folder), bytes_too=True
            )
            costs = {"up": measuring.run("up", "-n", str(count), "-t", "g5.xlarge")}
            measuring.run("launch", "line.py")  # sends the script, and warms the page cache
            costs["launch"] = median([measuring.run("launch", "line.py") for _ in range(RUNS)])
            costs["exec"] = median([measuring.run("exec", "--", "true") for _ in range(RUNS)])
            costs["down"] = measuring.run("down")
        yield {"nodes": count, **{verb: asdict(cost) for verb, cost in costs.items()}}


@contextmanager
def api_alone() -> Iterator[tuple[Any, dict[str, str]]]:
    """Yield a simulator whose instances run and never boot: nothing but the API is behind them."""
    # Imported here because the file's other half runs in another process and does not need it.
    from cloudddp.sim import control

    with tempfile.TemporaryDirectory(prefix="cloudddp-bench-") as home:
        found = control.start(Path(home), nodes="process", timing={"booting": 3600.0})
        try:
            yield found, {**environment(home), **control.environment(found)}
        finally:
            control.stop(Path(home))


def bench_api(count: int) -> dict[str, Cost]:
    """Return the cost of `up` until it waits for SSH, `ls` and `down` of nodes without hosts."""
    with api_alone() as (found, env), tempfile.TemporaryDirectory() as folder:
        measuring = Measuring("many", found.endpoint, env, Path(folder), bytes_too=False)
        up = measuring.run("up", "-n", str(count), "-t", "g5.xlarge", until="waiting for SSH")
        return {"up until it waits for SSH": up, "ls": measuring.run("ls"), "down": measuring.run("down")}


def bench(*, nodes: Sequence[int], write: bool) -> None:
    """Print a line per number of nodes; with `write`, put table and plot into docs/. Exits where matplotlib is missing."""
    if write and not figures.AVAILABLE:
        raise SystemExit(f"--write draws a plot, which needs matplotlib: {figures.INSTALL}")
    print(
        "scale: seconds, AWS calls, kB over SSH, threads and MB of memory of each command, on namespace nodes"
    )
    head = ["nodes", *(f"`{verb}`" for verb in VERBS)]
    table = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    found_rows: list[dict[str, Any]] = []
    load = os.getloadavg()[0]
    with simulator("namespace") as (found, env):
        inside = {**env, "CLOUDDDP_HOME": str(found.home), "PYTHONPATH": str(ROOT)}
        command = [
            script("cloudddp"),
            "sim",
            "exec",
            "--",
            sys.executable,
            str(Path(__file__)),
            json.dumps(nodes),
        ]
        process = subprocess.Popen(command, env=inside, stdout=subprocess.PIPE, text=True)
        with process:
            for text in process.stdout or ():
                found_rows.append(row := json.loads(text))
                cells = [str(row["nodes"]), *(_cell(Cost(**row[verb])) for verb in VERBS)]
                print("  " + "  |  ".join(cells), flush=True)
                table.append(f"| {' | '.join(cells)} |")
    if process.returncode:
        raise SystemExit(process.returncode)
    api = [f"{verb}: {_cell(cost)}" for verb, cost in bench_api(API_NODES).items()]
    for line in api:
        print(f"  {API_NODES} nodes without hosts, {line}")
    where = (
        f"{time.strftime('%Y-%m-%d')}, {os.cpu_count()} processors, load average {load:.1f} before and "
        f"{os.getloadavg()[0]:.1f} after."
    )
    print(f"  {where}")
    if write:
        alone = f"{API_NODES} nodes without hosts: {'; '.join(api)}."
        page = ROOT / "docs" / "benchmarks.md"
        page.write_text(
            replace_between(page.read_text(), "python -m bench scale", [where, "", *table, "", alone])
        )
        draw(found_rows, where, ROOT / "docs" / "scale.svg")


def draw(found: Sequence[dict[str, Any]], note: str, path: Path) -> None:
    """Draw a panel for each measure, and in it a line for each command, over the number of nodes."""
    sizes = [str(row["nodes"]) for row in found]
    with figures.figure(path, figsize=(9.2, 5.4)) as figure:
        figure.suptitle(f"by number of nodes; {note}", fontsize="medium")
        panels = figure.subplots(2, 3).flatten()
        for axes, (measure, title) in zip(panels, _MEASURES.items(), strict=False):
            for verb in VERBS:
                (line,) = axes.plot(sizes, [row[verb][measure] for row in found], label=verb)
                line.set_gid(f"{verb}-{measure}")
            axes.set(title=title, ylim=(0, None))
        panels[-1].axis("off")
        panels[-1].legend(*panels[0].get_legend_handles_labels(), loc="center", frameon=False)


def _cell(cost: Cost) -> str:
    moved = f", {cost.kilobytes:.0f} kB" if cost.kilobytes else ""
    return f"{cost.seconds:.2f} s, {cost.calls} calls{moved}, {cost.threads} threads, {cost.megabytes:.0f} MB"


def main() -> None:
    """In the simulator's network: print a line of JSON per row."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("nodes", type=json.loads)
    for row in rows(parser.parse_args().nodes):
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
