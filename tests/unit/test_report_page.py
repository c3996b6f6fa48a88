"""The page of a report escapes what anybody wrote; charts; the numbers in files of any kind."""

from __future__ import annotations

import io
import json
import math
import os
import random
import struct
from collections.abc import Mapping
from html.parser import HTMLParser
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from bench import report as example
from cloudddp.agent.protocol import event_files
from cloudddp.agent.protocol.codec import encode
from cloudddp.agent.protocol.gang import NodeFacts
from cloudddp.agent.protocol.jobs import Cause, Failure, Verdict
from cloudddp.agent.protocol.phases import JobPhase
from cloudddp.agent.protocol.progress import Straggler, ToleratedStall
from cloudddp.agent.protocol.readings import GpuReading, RankReading, Reading
from cloudddp.agent.protocol.results import Masked
from cloudddp.config import packages
from cloudddp.config.cluster_spec import ClusterSpec
from cloudddp.config.spec import Config, JobSpec, SetupSpec, SharedSpec
from cloudddp.job.launch_record import LaunchContext, LaunchRecord
from cloudddp.job.report import chart, page, series
from cloudddp.job.report.page import Evidence
from cloudddp.job.results.restore import results_here

JOB = "20261127-101500-be7c"
ATTACKS = (
    "<script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "' onmouseover='alert(1)",
    "</pre></style></title><script src=//evil.test/x></script>",
    "\x1b[2J\x00\u202egnp.exe\ud800 &lt;b&gt;",
)
# All that the page is made of: an element or attribute that somebody has smuggled in is another one.
ELEMENTS = frozenset(
    """html meta title style h1 h2 section table tr th td div b code pre p details summary ul li footer figure
    figcaption span svg path i""".split()
)
ATTRIBUTES = frozenset(
    "lang charset name content http-equiv class d style role aria-label viewbox preserveaspectratio".split()
)


class Elements(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: set[str] = set()
        self.attributes: set[str] = set()
        self.text = ""
        self.open: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.add(tag)
        self.attributes |= {name for name, _ in attrs}
        self.open += [tag] if tag not in ("meta", "html") else []

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def parsed(found: Evidence) -> Elements:
    written = page.write(found).read_text()
    elements = Elements(written)
    assert elements.elements <= ELEMENTS
    assert elements.attributes <= ATTRIBUTES
    assert elements.open == []
    return elements


def text_of(folder: Path, launch: LaunchRecord | None = None, journal: Any = ()) -> str:
    return parsed(Evidence(JOB, folder, launch, journal)).text


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    found = tmp_path / "results" / JOB
    (found / "cloudddp-logs" / "node0").mkdir(parents=True)
    return found


def put(folder: Path, node: int = 0, **records: Any) -> None:
    """Write records of a node by the names of their files."""
    for name, record in records.items():
        path = folder / "cloudddp-logs" / f"node{node}" / f"{name}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(encode(record))


def launch_record(text: str = "train.py", **facts: Any) -> LaunchRecord:
    return LaunchRecord(
        job=JOB,
        root="/p",
        target=text,
        config=Config(
            cluster=ClusterSpec(name="c"),
            job=JobSpec(retries=3),
            setup=SetupSpec(run=(f"{packages.title('r.txt')}\nif true; then", text), environment="r.txt"),
            shared=(SharedSpec(path="shared"),),
        ),
        names=("WANDB_API_KEY",),
        facts=LaunchContext(nodes=((0, "i-1", "p5.48xlarge", "us-east-1a"),), **facts),
    )


def test_page_shows_how_a_job_went(folder: Path) -> None:
    first = Failure(0, Cause.RANK, rank=3, exit_code=7, detail="ValueError: very-secret")
    put(
        folder,
        verdict=Verdict(
            JobPhase.FAILED, 7, 0, first, ("RuntimeError: no login with very-secret",), restarts=2, at=4600.0
        ),
        state={"job": "j", "node": 0, "state": "failed", "started": 1000.0, "restarts": 2},
        masked=Masked("ValueError: ****", ("RuntimeError: no login with ****",)),
        stragglers={"known": [vars(Straggler(3, 0, 0.4, 0.2, 60, 1100.0, until=1200.0))]},
        stall=ToleratedStall(1300.0, "ranks 0 and 1 wait in all_reduce"),
        facts=NodeFacts("8 x NVIDIA H100", "570.1", "3.12.3", "2.8.0", "12.8", "2.27.3"),
    )
    day = "1970-01-01T{}.000+00:00".format
    steps = ((JOB, "sending 4 files"), ("other", "of another job"), (JOB, "sending py-spy"))
    times = (day("03:00:00"), "soon", "0001-01-01T00:00:00+14:00", "0001-01-01T00:00:00")
    journal = (
        {"time": day("00:10:00"), "event": "ready"},
        *({"time": day("00:16:35"), "event": "launch", "job": job, "text": text} for job, text in steps),
        *({"time": time, "event": "gone"} for time in times),
    )
    logs = folder / "cloudddp-logs" / "node0"
    for name in ("stacks/0.txt", "stacks/²", "stacks/ras.txt", "ranks/0.log"):
        (logs / name).parent.mkdir(exist_ok=True)
        (logs / name).write_text(f"hang.py:8 in {name}")
    facts = {"hour": 98.32, "commit": "4f1e2d", "diff": "-lr = 1\n+lr = 2"}
    text = text_of(folder, launch_record(**facts, changed=(" M train.py", "?? new.py")), journal)
    for part in (
        "train.py", "failed, exit code 7", "1 h 00 min",
        "rank 3 on node 0 exited with code 7: ValueError: ****",
        "no login with ****",
        "$98.32 for that time ($98.32 an hour on demand for 1 node, with disks and addresses)",
        "00:10:00 UTCnodes ready",
        "03:00:00 UTCcluster removed", "00:16:35 UTCsending 4 files", "00:16:40 UTCjob started on node 0",
        "straggler from step 60: rank 3 takes 2.0 x", "rank 3 has caught up", "stall: ranks 0 and 1 wait",
        "job failed, after 2 restarts", "8 x NVIDIA H100570.13.12.32.8.012.82.27.3", "WANDB_API_KEY",
        "i-1p5.48xlargeus-east-1a98.32", "job.retries3", "Commit 4f1e2d", " M train.py", "+lr = 2",
        'shared[{"path": "shared"', "train.py: failed after 1 h 00 minWhat happenedjob",
        'setup.run["train.py"]', "Stacks of rank 0hang.py:8 in stacks/0.txt",
    ):  # fmt: skip
        assert part in text, part
    assert not [part for part in ("py-spy", "ras.txt", "²", "if true") if part in text]
    assert "very-secret" not in text
    assert "of another job" not in text
    assert "at most $" in text_of(folder, launch_record(hour=98.32, spot=True))
    put(folder, verdict=Verdict(JobPhase.SUCCEEDED, 0, 0, at=1015.0))
    text = text_of(folder, launch_record(hour=60.0))
    assert "ran for15 s" in text
    assert "$1.00 for 60 s, the least that EC2 bills ($60.00 an hour" in text


@pytest.mark.parametrize("attack", ATTACKS)
def test_nothing_that_anybody_wrote_becomes_a_part_of_the_page(folder: Path, attack: str) -> None:
    """A rank, a node, git, a user: the text is shown, and no element or attribute comes of it."""
    first = Failure(0, Cause.STALL, rank=0, detail=attack)
    words = attack.encode("utf-8", "replace").decode()
    put(
        folder,
        verdict=Verdict(JobPhase.FAILED, 1, 0, first, (words,), refusal=words, at=2.0),
        facts=NodeFacts(*[words[:60]] * 6),
        stall=ToleratedStall(1.0, words),
        masked=Masked(words, (words,)),
    )
    logs = folder / "cloudddp-logs" / "node0"
    (logs / "readings.jsonl").write_bytes(encode(Reading(1.0, metrics={words[:60]: 1.0})) + b"\n")
    hostile = folder / words.replace("/", "|").replace("\0", "")
    hostile.mkdir()
    (hostile / "metrics.jsonl").write_text(json.dumps({words: 1, "kind": words, "step": 2}))
    (hostile / "x.tfevents.1").write_bytes(example.event(1, **{words[:60]: 2.0}))
    launch = launch_record(attack, commit=attack, changed=(attack,), diff=attack)
    step = {"time": "1970-01-01T00:10:00.000+00:00", "event": "launch", "job": JOB, "text": attack}
    elements = parsed(Evidence(JOB, folder, launch, ({"time": attack, "event": attack}, step)))
    assert elements.text.count("alert(1)") >= (5 if "alert" in attack else 0)
    assert not set("\x1b\x00\u202e") & set(elements.text)


def test_login_in_a_url_is_not_shown(folder: Path) -> None:
    text = text_of(folder, launch_record("pip install -i https://me:hunter2@index.test/simple"))
    assert "https://****@index.test/simple" in text
    assert "hunter2" not in text


def test_unreadable_records_are_left_out(folder: Path) -> None:
    for name in ("verdict", "state", "stragglers", "stall", "facts", "masked"):
        for content in (b"", b"{", b"[]", b"\xff", b'{"started": 1e300}', b'{"known": [1]}', b"[" * 100_000):
            (folder / "cloudddp-logs" / "node0" / f"{name}.json").write_bytes(content)
            assert f"job {JOB}" in text_of(folder)


def test_report_is_beside_the_logs_and_takes_the_place_of_a_link(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("kept")
    (folder / "cloudddp-logs" / page.REPORT).symlink_to(tmp_path / "precious")
    assert page.write(Evidence(JOB, folder, None, ())) == folder / "cloudddp-logs" / page.REPORT
    assert (tmp_path / "precious").read_text() == "kept"
    assert (folder / "cloudddp-logs" / page.REPORT).stat().st_mode & 0o777 == 0o600  # it may have secrets
    assert results_here(tmp_path) == []
    os.mkfifo(folder / "metrics.jsonl")  # among the results, a pipe is not waited for
    assert charts_of(folder) == {}


def charts_of(folder: Path) -> dict[str, Mapping[str, list[series.Point]]]:
    """By title, and by what they are over if that is not the step."""
    found, _ = series.of_results(folder)
    return {one.title + f" by {one.x}" * (one.x != "step"): MappingProxyType(one.lines) for one in found}


def test_metrics_of_any_kind(folder: Path) -> None:
    lines = (
        '{"step": 1, "loss": 2.5, "note": "x", "ok": true, "nested": {"a": 1}}', "not JSON", "[1, 2]", "{",
        "\xff", '{"step": 2, "loss": NaN}', '{"step": 3, "loss": Infinity}', '{"step": 4, "loss": 1e999}',
        '{"loss": ' + "9" * 400 + "}", '{"step": 5, "loss": ' + "9" * 5000 + "}", '{"step": "6", "loss": 1}',
        '{"step": NaN, "loss": 1}', "[" * 5000, '{"step": 7, "loss": 1, "kind": "eval", "time": 12}',
        '{"loss": 0.5}', '{"step": 9, "loss": 3' + " " * 70_000 + "}", '{"step": 10, "loss": 0.25}',
    )  # fmt: skip
    (folder / "metrics.jsonl").write_bytes("\n".join(lines).encode("latin-1"))
    (folder / "cloudddp-logs" / "metrics.jsonl").write_text('{"of": 1}')
    assert charts_of(folder) == {
        "loss": {".": [(1, 2.5), (10, 0.25)]},
        "loss by row": {".": [(14, 0.5)]},
        "eval/loss": {".": [(7, 1)]},
    }


@pytest.mark.parametrize("kind", ["metrics.jsonl", "x.tfevents.1"])
@pytest.mark.parametrize(
    ("written", "drawn", "note"),
    [
        ("a0 a1 a2 a3 a4 a2 a3 a4 a1 a2", "a0=0 a1=8 a2=9", "from step 1 on"),  # restarted twice
        ("a0 a1 a1 a2", "a0=0 a1=1 a1=2 a2=3", ""),
        ("a10 e10 a20 a30 e30 a20", "a10=0 a20=5 e10=1", "from step 20 on"),  # evaluated, not again yet
        ("a10 e1 a20 e2 a30 e3 a20 e2 a30", "a10=0 a20=6 a30=8 e1=1 e2=7", "from step 2 on"),  # e: epochs
    ],
)
def test_values_before_a_restart_are_superseded(
    folder: Path, kind: str, written: str, drawn: str, note: str
) -> None:
    rows = [(int(one[1:]), {one[0]: number}) for number, one in enumerate(written.split())]
    lines = [json.dumps({"step": step, **values}).encode() + b"\n" for step, values in rows]
    events = [example.event(step, **values) for step, values in rows]
    (folder / kind).write_bytes(b"".join(lines if kind == "metrics.jsonl" else events))
    charts, notes = series.of_results(folder)
    found = [f"{chart.title}{x}={y:.0f}" for chart in charts for x, y in chart.lines["."]]
    assert (sorted(found), len(notes)) == (sorted(drawn.split()), bool(note))
    assert note in "".join(text for _, text in notes)


def test_what_was_written_before_the_job_is_left_out_and_named(folder: Path) -> None:
    """Lines and events by what they say of their time, files by that of the last write on the node."""
    began = example.BEGAN
    lines = ({"time": began - 1}, {"timestamp": "2020-01-01T00:00:00Z"}, {"wall_time": (began - 1) * 1000},
             {"time": 0.5}, {"time": began + 1}, {"timestamp": "2020-01-01"})  # fmt: skip
    text = [json.dumps({"step": number, "m": number} | line) for number, line in enumerate(lines)]
    (folder / "metrics.jsonl").write_text("\n".join(text))
    events = (example.event(11, event=1, at=began - 1), example.event(12, event=2, at=began + 1))
    (folder / "own.tfevents.2").write_bytes(b"".join(events))
    (folder / "old.tfevents.1").write_bytes(example.event(585, event=3, at=began + 1))
    os.utime(folder / "old.tfevents.1", (began - 1, began - 1))
    put(folder, state={"job": "j", "node": 0, "state": "failed", "started": began + 0.5})
    charts, notes = series.of_results(folder, Evidence(JOB, folder, None, ()).began)
    drawn = {one.title: one.lines["."] for one in charts}
    assert drawn == {"m": [(3, 3), (4, 4), (5, 5)], "event": [(12, 2)]}
    assert [name for name, _ in notes] == ["old.tfevents.1", "metrics.jsonl", "."]
    assert "no time" not in text_of(folder)
    launched = [{"time": "2026-01-01T00:00:00+00:00", "event": "launch", "job": job} for job in ("2025", JOB)]
    assert "metrics.jsonlits lines have no time" in text_of(folder, journal=launched)
    put(folder, state={"job": "j", "node": 0, "state": "failed"})
    assert "of this job." in text_of(folder)  # no rank was started


def test_long_files_are_read_in_part(folder: Path) -> None:
    """Nodes may wait for the report: what is read of a job's files does not grow with them."""
    path, count = folder / "metrics.jsonl", 100_000
    path.write_text("".join(f'{{"loss": {n}}}\n' for n in range(count)))
    most = path.stat().st_size // 10
    found = [json.loads(line) | {"number": number} for number, line in series.lines(path, most)]
    assert 0.08 * count < len(found) < 0.12 * count
    assert found[0]["loss"] == 0
    assert found[-1]["loss"] > 0.85 * count
    assert all(abs(one["number"] - one["loss"]) < 0.12 * count for one in found)
    assert [n for n, _ in series.lines(path, most * 20)] == list(range(count))
    os.truncate(path, 1 << 36)
    assert len(list(series.lines(path, 1 << 20))) < 2000
    assert len(series.head(path, most)) == most


@pytest.mark.parametrize(
    ("values", "shown"),
    [
        # its end is not flat
        ([10.9, *[4 - n / 20 for n in range(20)]], ["last 3.05", ">3</i>", ">3.2</i>"]),
        ((10.9, 4.0, 3.1), ["last 3.1", ">0</i>", ">5</i>"]),
        ([n / 20 for n in range(20)], ["last 0.95", ">0</i>", ">0.2</i>"]),
        ([1e100, *[1e-300] * 20], ["last 1e-300"]),
    ],
)
def test_axis_shows_the_end_of_a_curve(values: tuple[float, ...], shown: list[str]) -> None:
    drawn = chart.figure(series.Chart("loss", "", "step", {"a": list(enumerate(values))}))
    assert not [part for part in shown if part not in drawn]


def test_curves_are_of_what_a_script_measures(folder: Path) -> None:
    """Not of what only counts; and a value that is not finite is named."""
    events = [example.event(n, **{"hp_metric": -1.0, "train/epoch": 1.0, "epoch": 1.0}) for n in range(3)]
    events += [example.event(n, loss=math.nan if n > 1 else 1.0) for n in range(4)]
    (folder / "x.tfevents.1").write_bytes(b"".join(events))
    (folder / "metrics.jsonl").write_text('{"step": 4, "m": Infinity}')
    readings = folder / "cloudddp-logs" / "node0" / "readings.jsonl"
    of_rank, metrics = (RankReading(0, cores=1.5),), {"step": 3.0, "epoch": 1.0, "loss": None}
    readings.write_bytes(encode(Reading(1.0, (), of_rank, metrics)))
    assert charts_of(folder) == {"loss": {".": [(0, 1.0), (1, 1.0)]}}
    assert [one.title for one in series.of_readings({0: readings})] == ["CPU cores in use"]
    text = text_of(folder)
    assert "loss is NaN or infinite, first at step 2" in text
    assert "m is NaN or infinite, first at step 4" in text


def test_charts_and_points_are_limited(folder: Path) -> None:
    """Points are thinned so that extremes and order stay."""
    (folder / "metrics.jsonl").write_text(json.dumps({f"m{n}": n for n in range(1000)}))
    text = text_of(folder)
    assert ("More metrics are left out." in text, "m59" in text, "m61" in text) == (True, True, False)
    draw = random.Random(1)
    points = [(float(n), draw.random()) for n in range(10_000)]
    points[4321], points[8765] = (4321.0, 9.0), (8765.0, -9.0)
    shuffled = draw.sample(points, len(points))
    found = series.thin(shuffled, 200)
    assert len(found) <= 200
    assert {points[0], points[4321], points[8765], points[-1]} <= set(found)
    assert found == sorted(found)
    assert series.thin(points[:50], 50) == points[:50]


@pytest.mark.parametrize("x", [0, 5, 1e99, -1e99])
@pytest.mark.parametrize("y", [0, 1, 1 + 2e-16, -1e99, 5e-324])
def test_any_points_can_be_drawn(x: float, y: float) -> None:
    for points in ([(x, y)], [(1, 1), (x, y)], [(x, y), (5, 1e99), (1e99, 0)]):
        drawn = chart.figure(series.Chart("t", "s", "step", {"a": points}))
        assert [word in drawn for word in ("nan", "inf", 'd="M')] == [False, False, True]


def test_of_many_ranks_the_stragglers_are_marked(folder: Path) -> None:
    ranks = tuple(RankReading(r, seconds=0.5) for r in range(12))
    gpus = ((GpuReading(0, utilization=50 + n, memory=2048),) for n in range(5))
    rows = (encode(Reading(60.0 * n, gpu, ranks)) + b"\n" for n, gpu in enumerate(gpus))
    readings = folder / "cloudddp-logs" / "node0" / "readings.jsonl"
    readings.write_bytes(b"".join(rows) + b'{"at": 1e99}\nbroken\n{"at": 1, "gpus": [{}]}\n')
    put(folder, stragglers={"known": [vars(Straggler(7, 0, 0.4, 0.2, 60, 1100.0))]})
    found = {one.title: one for one in series.of_readings({0: readings})}
    assert found["GPU utilization"].lines == {"node 0, GPU 0": [(n, 50 + n) for n in range(5)]}
    assert (found["GPU memory"].lines["node 0, GPU 0"][0], len(found["Step time"].lines)) == ((0, 2), 12)
    text = text_of(folder)
    assert not [part for part in ("rank 7, straggler", "11 in grey") if part not in text]


def read(data: bytes, most: int = 1 << 20) -> list[tuple[str, int, float]]:
    rows = event_files.rows(io.BytesIO(data), most)
    return [(tag, row.step, value) for row in rows for tag, value in row.values.items()]


@pytest.mark.torch
def test_files_of_tensorboard_are_read(folder: Path) -> None:
    torch, tensorboard = (pytest.importorskip(name) for name in ("torch", "torch.utils.tensorboard"))
    with tensorboard.SummaryWriter(folder / "run") as writer:
        for step in (0, 1, 300, 2**40):
            writer.add_scalar("loss", 0.5 + step, step)
        writer.add_scalar("nan", float("nan"), 1)
        writer.add_scalar("before", 2.0, -5)
        writer.add_text("text", "x" * 100_000)
        writer.add_histogram("weights", torch.tensor([1.0, 2.0, 3.0]), 1)
        writer.add_scalars("pair", {"a": 1.0}, 2)
    found = charts_of(folder)
    assert found["loss"]["run"][:3] == [(0, 0.5), (1, 1.5), (300, 300.5)]
    assert (found["loss"]["run"][3][0], found["before"]["run"]) == (2**40, [(-5, 2.0)])
    assert (found["pair"]["run/pair_a"], found.keys()) == ([(2, 1.0)], {"loss", "before", "pair"})
    with tensorboard.SummaryWriter(folder / "run", purge_step=1, filename_suffix=".z") as writer:
        writer.add_scalar("loss", 7.0, 2)  # the step does not fall below an event that is left
    assert charts_of(folder)["loss"]["run"] == [(0, 0.5), (2, 7.0)]
    assert charts_of(folder)["before"]["run"] == [(-5, 2.0)]


def test_truncated_event_files_give_what_is_complete() -> None:
    data = example.event(1, a=1.0) + example.event(2, a=2.0, b=3.0)
    whole = read(data)
    assert whole == [("a", 1, 1.0), ("a", 2, 2.0), ("b", 2, 3.0)]
    for end in range(len(data)):
        assert read(data[:end]) == (whole[:1] if end >= len(example.event(1, a=1.0)) else [])
    assert read(data, 10) == whole[:1]


def test_end_of_an_event_file_is_read_from_the_first_record_there() -> None:
    data = b"".join(example.event(step, loss=float(step)) for step in range(300)) + struct.pack("<QI", 90, 0)
    length = len(example.event(0, loss=0.0))
    for most in (length + 20, 10 * length - 1, 10 * length, 10 * length + 7, len(data), 1 << 20):
        found = [row.step for row in event_files.last_rows(io.BytesIO(data), most)]
        assert found == list(range(300))[-((min(most, len(data)) - 12) // length) :]
    attack = (b"\x10\0" + bytes(6) + b"abcd\x09" + bytes(8) + b"\x10") * 3000
    assert event_files.last_rows(io.BytesIO(attack), len(attack) - 1) == []


def test_hostile_event_files_do_no_harm() -> None:
    good = example.event(7, loss=1.0)
    for length in (1 << 63, (1 << 64) - 1, 1 << 17, 1 << 16, 100):
        read(struct.pack("<QI", length, 0) + b"\xff" * 300 + good)
    skipped = struct.pack("<QI", 1 << 17, 0) + bytes((1 << 17) + 4)
    skipped += struct.pack("<QI", 3, 0) + b"\x2a\xff\xff" + bytes(4)
    assert read(skipped + good) == [("loss", 7, 1.0)]
    draw = random.Random(2)
    for _ in range(2000):
        data = bytearray(good * 3)
        for _ in range(draw.randint(1, 8)):
            data[draw.randrange(len(data))] = draw.randrange(256)
        for tag, step, value in read(bytes(data)):
            assert (type(tag), type(value)) == (str, float)
            assert len(tag) <= event_files.MAX_TAG
            assert -(1 << 63) <= step < 1 << 63
        read(draw.randbytes(400))
