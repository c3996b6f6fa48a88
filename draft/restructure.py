"""git mv the modules of train/ into packages, and rewrite imports. Run in the repository's root."""
import re, subprocess
from pathlib import Path

MOVES = {  # old module -> new module
    "train.options": "train.cli",
    "train.rank": "train.run",
    "train.losses": "train.loss",
    "train.communicator": "train.distributed.communicator",
    "train.process_group": "train.distributed.process_group",
    "train.peer_monitor": "train.distributed.peer_monitor",
    "train.rank_info": "train.distributed.rank_info",
    "train.device": "train.distributed.device",
    "train.spawn": "train.distributed.spawn",
    "train.data": "train.data.datasets",
    "train.datafiles": "train.data.files",
    "train.augment": "train.data.augment",
    "train.loader": "train.data.loader",
    "train.sampler": "train.data.sampler",
    "train.parallel": "train.parallel.select",
    "train.ddp": "train.parallel.ddp",
    "train.fsdp": "train.parallel.fsdp",
    "train.pipeline": "train.parallel.two_devices",
    "train.stages": "train.parallel.stages",
    "train.partition": "train.parallel.partition",
    "train.checkpoint": "train.checkpoint.snapshots",
    "train.snapshot": "train.checkpoint.full",
    "train.sharded_snapshot": "train.checkpoint.sharded",
    "train.metrics": "train.record.output",
    "train.running_stats": "train.record.running_stats",
    "train.step_reports": "train.record.step_reports",
    "train.throughput": "train.record.throughput",
    "train.bench": "bench.train.bench",
    "train.bench_data": "bench.train.data",
    "train.bench_worker": "bench.train.worker",
    "train.sweep": "bench.train.sweep",
    "train.sweep_config": "bench.train.sweep_config",
    "train.sweep_timing": "bench.train.sweep_timing",
}
def path(module): return Path(*module.split(".")).with_suffix(".py")
def run(*argv): subprocess.run(argv, check=True)

for package, text in {
    "train/distributed": '"""The ranks of a run: how they find each other, their devices, and their collective operations."""\n',
    "train/data": '"""Data: the datasets, which samples each rank takes, reading them in batches, and augmentation."""\n',
    "train/parallel": '"""How a model is spread over devices and ranks."""\n',
    "train/checkpoint": '"""Snapshots: the state of a run at a step, on disk."""\n',
    "train/record": '"""What a run reports: metrics, status, speed."""\n',
    "bench/train": '"""Benchmarks of the trainer."""\n',
}.items():
    Path(package).mkdir(parents=True, exist_ok=True)
    Path(package, "__init__.py").write_text(text)
    run("git", "add", package)
for old, new in sorted(MOVES.items(), key=lambda item: len(item[0]), reverse=True):
    run("git", "mv", str(path(old)), str(path(new)))
run("git", "mv", "train/smddp", "smddp")

FILES = [Path(p) for p in subprocess.run(["git", "ls-files", "*.py"], capture_output=True, text=True, check=True).stdout.split()]
names = {old.removeprefix("train."): new for old, new in MOVES.items()}
for file in FILES:
    text = before = file.read_text()
    if "train" not in text:
        continue
    # from train.x import ...; import train.x; "train.x" in strings and docstrings
    def full(m):
        return MOVES.get(m[0], m[0])
    text = re.sub(r"\btrain\.[a-z_]+\b(?!\()", full, text)
    # train/x.py in texts
    text = re.sub(r"\btrain/([a-z_]+)\.py\b", lambda m: str(path(names[m[1]])) if m[1] in names else m[0], text)
    # from train import a, b
    def members(m):
        indent, rest = m[1], []
        lines = []
        for name in [one.strip() for one in m[2].strip("()\n ").rstrip(",").split(",")]:
            bare, _, alias = name.partition(" as ")
            if bare in names:
                package, module = names[bare].rsplit(".", 1)
                suffix = f" as {alias or bare}" if module != (alias or bare) else ""
                lines.append(f"{indent}from {package} import {module}{suffix}")
            else:
                rest.append(name)
        if rest:
            lines.insert(0, f"{indent}from train import {', '.join(rest)}")
        return "\n".join(lines)
    text = re.sub(r"^([ \t]*)from train import (\([^)]*\)|[^\n(]+)", members, text, flags=re.M)
    if text != before:
        file.write_text(text)
