"""The page of a report, from what is on this computer about a job: its results, its logs, and what was
recorded when it was launched. A sentence says what is missing."""

from __future__ import annotations

import contextlib
import json
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from cloudddp.agent import replies
from cloudddp.agent.protocol.codec import MAX_REPLY, MAX_TIME, ProtocolError, within
from cloudddp.agent.protocol.gang import NodeFacts
from cloudddp.agent.protocol.jobs import StateFile, Verdict
from cloudddp.agent.protocol.progress import Stragglers, ToleratedStall
from cloudddp.agent.protocol.readings import READINGS_FILE
from cloudddp.agent.protocol.results import FACTS_FILE, MASKED_FILE, Masked
from cloudddp.agent.protocol.stacks import MAX_STACK
from cloudddp.cluster.prices import billed_hours
from cloudddp.config.schema import LISTS
from cloudddp.config.spec import Config
from cloudddp.errors import CloudDDPError
from cloudddp.files import Folder
from cloudddp.formats import cut, dollars, duration, plural
from cloudddp.job import failure_text, launch_record
from cloudddp.job.launch_record import LaunchContext, LaunchRecord
from cloudddp.job.report import series
from cloudddp.job.report.chart import Html, figure, joined, tag
from cloudddp.job.results.safe_names import LOGS
from cloudddp.local_state import LAUNCH, folder_of_job
from cloudddp.text import one_line

MAX_NODES = 256
REPORT = "report.html"
# An element that somebody has smuggled in could neither load nor run anything.
POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
_HEAD = Html(f"""<!doctype html>
<html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<meta http-equiv="Content-Security-Policy" content="{POLICY}"><meta name="color-scheme" content="light dark">
""")
_NOTES = 20  # that are shown
_EVENTS = {"made": "nodes launched", "ready": "nodes ready", "gone": "cluster removed"}

T = TypeVar("T")


class Evidence:
    """What is known of a job; `folder` has its results, `nodes` are the folders of the nodes' logs in it."""

    def __init__(
        self, job: str, folder: Path, launch: LaunchRecord | None, journal: Sequence[dict[str, Any]]
    ) -> None:
        self.job, self.folder, self.launch, self.journal = job, folder, launch, journal
        self.facts = launch.facts if launch else None
        logs = [path for path in (folder / LOGS).glob("node*") if re.fullmatch("node[0-9]{1,4}", path.name)]
        self.nodes = dict(sorted((int(path.name[4:]), path) for path in logs)[:MAX_NODES])
        self.states = self.read("state.json", StateFile)
        self.verdict = next(iter(self.read("verdict.json", Verdict).values()), None)
        self.masked = next(iter(self.read(MASKED_FILE, Masked).values()), Masked())
        starts = [state.started for state in self.states.values()]
        self.started = min((at for at in starts if at), default=None)
        # Whole seconds, as file systems may have them. Without a start no rank has written anything.
        self.began = float(int(self.started)) if self.started else math.inf if starts else 0.0
        at = self.verdict.at if self.verdict else None
        self.seconds = max(at - self.started, 0.0) if self.started and at else None
        self.slow = next(iter(self.read("stragglers.json", Stragglers).values()), Stragglers()).known

    @classmethod
    def of(cls, job: str, folder: Path) -> Evidence:
        """Return what is on this computer of a job whose results are in a folder."""
        cluster, launch, journal = folder_of_job(job), None, list[dict[str, Any]]()
        with contextlib.suppress(CloudDDPError, OSError, ValueError):
            if cluster is not None:
                journal = cluster.events()
                launch = launch_record.find(cluster, job)
        return cls(job, folder, launch, journal)

    def read(self, name: str, kind: type[T]) -> dict[int, T]:
        """Return the records of that name by node, without those that are missing or unreadable."""
        found = {}
        for node, path in self.nodes.items():
            with contextlib.suppress(ProtocolError):
                found[node] = replies.decode(series.head(path / name, MAX_REPLY + 1), kind)
        return found


def write(found: Evidence) -> Path:
    """Write the report beside the logs, where nothing of the job is; return its path. Raises OSError."""
    found.folder.mkdir(parents=True, exist_ok=True)
    with Folder.at(found.folder) as results, results.enter(LOGS, make=0o755) as folder:
        folder.replace(REPORT, page(found).encode())
    return found.folder / LOGS / REPORT


def page(found: Evidence) -> Html:
    sections = {
        "What happened": _what_happened,
        "Timeline": _timeline,
        "Plots": _plots,
        "Nodes": _nodes,
        "Settings": _settings,
        "Code": _code,
    }
    parts = [tag("section", tag("h2", name), section(found)) for name, section in sections.items()]
    style = tag("style", Html(Path(__file__).with_suffix(".css").read_text()))
    title, footer = _title(found), f"Written by cloudddp at {_when(datetime.now(UTC).timestamp())}."
    return joined(_HEAD, tag("title", title), style, tag("h1", title), *parts, tag("footer", footer))


def _title(found: Evidence) -> str:
    script = cut(one_line(found.launch.script.shown), 100) if found.launch else f"job {found.job}"
    ran = f" after {duration(found.seconds)}" if found.seconds else ""
    return f"{script}: {found.verdict.phase.value}{ran}" if found.verdict else script


def _when(seconds: float) -> str:
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%d %H:%M:%S} UTC"


def _table(rows: Iterable[Sequence[object]], header: str = "") -> Html:
    """Return a table without the columns of its header that are empty."""
    rows, names = list(rows), header.split("|") if header else []
    used = [at for at in range(len(names)) if any(row[at] != "" for row in rows)]
    rows = [[row[at] for at in used] for row in rows] if names else rows
    lines = [tag("tr", *(tag("td", one) for one in row)) for row in rows]
    head = [tag("tr", *(tag("th", names[at]) for at in used))] if names else []
    return tag("div", tag("table", *head, *lines), class_="wide") if lines else Html()


def _what_happened(found: Evidence) -> Html:
    verdict, launch, facts = found.verdict, found.launch, found.facts
    script = launch and tag("code", launch.script.shown)
    rows: list[tuple[str, object]] = [("job", found.job), ("script", script)]
    rows += [("continues", launch and launch.resumed_from)]
    if verdict is None:
        runs = any(not one.state.ended for one in found.states.values())
        rows += [("state", "running when its logs were pulled" if runs else "unknown: no logs were pulled")]
        return _table(row for row in rows if row[1])
    state = f"{verdict.phase.value}, exit code {verdict.exit_code}"
    rows += [("state", tag("b", state, class_=verdict.phase.value))]
    first = verdict.first and replace(verdict.first, detail=found.masked.detail)
    rows += [("failed first", first and failure_text.sentence(first))]
    rows += [("not restarted", verdict.refusal)]
    if found.seconds is not None:
        rows += [("ran for", duration(found.seconds)), ("cost", _cost(facts, found.seconds))]
    lines = tag("pre", "\n".join(found.masked.last_lines)) if any(found.masked.last_lines) else Html()
    return joined(_table(row for row in rows if row[1]), lines, *_stacks(found))


def _stacks(found: Evidence) -> Iterator[Html]:
    """Yield the stacks of the ranks, as they were read while the job did nothing."""
    files = [one for path in found.nodes.values() for one in sorted(path.glob("stacks/[0-9]*.txt"))]
    for path in files:
        if text := series.head(path, MAX_STACK).decode(errors="replace").strip():
            yield tag("details", tag("summary", f"Stacks of rank {path.stem}"), tag("pre", text))


def _cost(facts: LaunchContext | None, seconds: float) -> str:
    """Return what the nodes cost for so long, at the price that the plan has shown."""
    if facts is None or not facts.hour:
        return "unknown: no price was recorded"
    hour, hours = len(facts.nodes) * facts.hour, billed_hours(seconds)
    usd = f"{'at most ' if facts.spot else ''}{dollars(hour * hours)}"
    time = "that time" if hours > billed_hours(0) else f"{hours * 3600:.0f} s, the least that EC2 bills"
    nodes = plural(len(facts.nodes), "node")
    rate = f"{dollars(hour)} an hour on demand for {nodes}, with disks and addresses"
    return f"{usd} for {time} ({rate}), without data transfer"


def _timeline(found: Evidence) -> Html:
    rows: list[tuple[float, str]] = []
    for event in found.journal:
        is_own = event.get("event") == LAUNCH and event.get("job") == found.job
        what = event.get("text") if is_own else _EVENTS.get(str(event.get("event")))
        with contextlib.suppress(ValueError, OverflowError):
            at = datetime.fromisoformat(str(event.get("time"))).timestamp()
            within(0, MAX_TIME)("time", at)
            rows += [(at, str(what))] if what and "py-spy" not in str(what) else []
    for node, state in found.states.items():
        rows += [(state.started, f"job started on node {node}")] if state.started else []
    for one in found.slow:
        rows += [(one.since, f"straggler from step {one.step}: {one.text}")]
        rows += [(one.until, f"rank {one.rank} has caught up, or ended")] if one.until else []
    rows += [
        (one.since, f"stall: {one.detail}") for one in found.read("stall.json", ToleratedStall).values()
    ][:1]
    if found.verdict and found.verdict.at:
        after = f", after {plural(found.verdict.restarts, 'restart')}" if found.verdict.restarts else ""
        rows += [(found.verdict.at, f"job {found.verdict.phase.value}{after}")]
    table = _table(((_when(at), what) for at, what in sorted(rows)), "time|event")
    return table or joined("Nothing is known of when it ran.")


def _plots(found: Evidence) -> Html:
    earlier = (one for one in found.journal if one.get("event") == LAUNCH and str(one.get("job")) < found.job)
    of_results, notes = series.of_results(found.folder, found.began, is_first=not any(earlier))
    of_nodes = series.of_readings({node: path / READINGS_FILE for node, path in found.nodes.items()})
    charts, slow = [*of_nodes, *of_results], {f"rank {one.rank}" for one in found.slow}
    drawn = tag("div", *(figure(chart, slow) for chart in charts[: series.MAX_CHARTS]), class_="charts")
    more = "More metrics are left out." if len(charts) > series.MAX_CHARTS else ""
    if not charts:
        drawn, more = Html(), "No metrics.jsonl, TensorBoard file or reading of the nodes is of this job."
    if len(notes) > _NOTES:
        notes[_NOTES:] = [("...", f"and {len(notes) - _NOTES} more")]
    return joined(drawn, more, _table(notes, "file or folder|note"))


def _nodes(found: Evidence) -> Html:
    facts, known = found.facts, found.read(FACTS_FILE, NodeFacts)
    launched = {rank: rest for rank, *rest in facts.nodes} if facts else {}
    price, rows = f"{facts.hour:.2f}" if facts and facts.hour else "unknown", []
    for node in sorted({*launched, *known}):
        one = known.get(node, NodeFacts())
        versions = (one.gpus, one.driver, one.python, one.torch, one.cuda, one.nccl)
        rows.append((node, *launched.get(node, ("", "", "")), price, *versions))
    missing = "" if known else "No versions of the nodes are known: their preflight records them."
    header = "node|instance|type|zone|USD an hour, with disks|GPUs|driver|Python|torch|CUDA|NCCL"
    return joined(_table(rows, header), tag("p", missing))


def _settings(found: Evidence) -> Html:
    if found.launch is None:
        return joined("It was not launched from this computer, so its settings are not known here.")
    given, standard = (msgspec.to_builtins(one) for one in (found.launch.config, Config()))
    lists = [(name, given.pop(name)) for name in LISTS]
    rows = [(name, json.dumps(value)) for name, value in lists if value]
    if given["setup"]["environment"]:  # the first command is cloudddp's own (packages.derived)
        given["setup"]["run"] = given["setup"]["run"][1:]
    for section, values in given.items():
        changed = [(key, value) for key, value in values.items() if value != standard[section].get(key)]
        rows += [(f"{section}.{key}", json.dumps(value, ensure_ascii=False)) for key, value in changed]
    names = ", ".join(found.launch.names) or "none"
    rows.append(("variables of the ranks", f"{names} (their values are not recorded)"))
    return joined(_table(rows), tag("p", "All other settings had their defaults."))


def _code(found: Evidence) -> Html:
    git = found.facts
    if git is None or not git.commit:
        return joined("No revision is known: launched elsewhere, or the project was in no git repository.")
    changed = tag("pre", "\n".join(git.changed)) if git.changed else tag("p", "Nothing was changed since.")
    diff = tag("details", tag("summary", "What was changed"), tag("pre", git.diff)) if git.diff else ""
    return joined(tag("p", "Commit ", tag("code", git.commit)), changed, diff)
