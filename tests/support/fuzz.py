"""Random command lines, variables and configuration files, each made from a seed and run in a folder of its
own."""

from __future__ import annotations

import os
import random
import string
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from support.commands import commands
from support.harness import TIMEOUT, clean_environment
from support.processes import Process, Zygote

from cloudddp.cli.main import main
from cloudddp.config.schema import SECTIONS, fields

_AT_ONCE = 3
# Texts for every option, argument and setting: numbers, characters, what a shell or a format would act on,
# paths, and words that some setting takes.
TEXTS = [
    *["", " ", "\n", "a\nb", "\t", "; id", "A\n=B", '{"throttle": 1}', "9" * 5000, "b" * 70000],
    *["\x01", "\x1b[31mred", "\x1b]0;title\x07", "\x9b31m", "\udcff\udcfe", "A=\udcff", '{"a": ' * 3000],
    *["ü", "日本", "e\u0301", "\u202egnp.exe", "\u200b", "\ufeff", "😀", "½", "٣"],
    *"- -- -1 --help 0 1 2 1e9 1e400 -0.0 nan inf 11111111111111111111 0x10 1_000 $(id) `id` * ~ %s".split(),
    *"{} . .. ../../x a/b \\ train.py train.py:0 main -m @file @ = A= =A A=B 1A=B RANK=1 2x8 gpu 1,1".split(),
    *", true null c10d g5.xlarge p4d.24xlarge us-east-1 us-east-1a eu-nowhere-9 ami-0 0.0.0.0/0 ::/0".split(),
    *"i-0 node default [] 2026-01-01 subnet-0 missing missing/deep folder file file/x link loop fifo".split(),
    *"/dev/null /dev/full /dev/zero /proc/self/mem cloudddp.toml".split(),
]
PLAIN = """\
up -y -n 2 -t g5.xlarge --max-hours 1; up -y --spot --max-cost 5; up; down -y; down; status --json; ls
launch -d train.py --lr 1; launch -m main; run -y train.py; jobs; logs -f; cancel; sync; pull --to out
exec -- id; ssh 0 id; init new; allow-me; extend --until 18:00; cost; sim status; sim fault kill 0; --help\
""".replace("\n", "; ").split("; ")
VARIABLES = {
    "HOME": ["", "missing", "\udcff"],
    "LC_ALL": ["C", "x" * 300],
    "TERM": ["", "dumb", "\x1b"],
    "COLUMNS": ["-1", "1", "9" * 40],
    "AWS_REGION": ["", "us-east-1\n", "\udcff", "x" * 300, "../.."],
    "AWS_PROFILE": ["", "missing", "\udcff"],
    "AWS_CONFIG_FILE": ["missing", "folder", "loop"],
    "AWS_ACCESS_KEY_ID": ["", "\udcff", "a\nb", "x" * 5000],
    "AWS_ENDPOINT_URL": ["", "nonsense", "file:///etc/passwd", "http://127.0.0.1:99999", "\udcff"],
    "AWS_CA_BUNDLE": ["missing", "folder"],
    "AWS_MAX_ATTEMPTS": ["", "-1", "x"],
    "CLOUDDDP_HOME": ["", "file", "loop", "/dev/null/x"],
    "CLOUDDDP_YES": ["maybe", "\udcff"],
    "CLOUDDDP_CLUSTR": ["x"],
}
VALUES = [  # of keys in the file
    *'1 -1 0x7f 1.5 nan -inf 1e400 true "" "gpu" "us-east-1" "g5.xlarge" "\\u001b[31m" "\\u0000"'.split(),
    *'"\\u202e" "\\ud800" 2026-01-01 9999-99-99 [] {} unquoted \udcff ["a",1] {A="B"} {A=1}'.split(),
    *["'''\n\n'''", "9" * 5000, '"' + "a" * 70000 + '"', "[" * 3000, "[" * 60 + "]" * 60],
]
EXCLUDED = ("sim start", "sim shell", "sim exec")  # they run any program, or start a process to be ended


@dataclass
class Case:
    """Strings stand for bytes, as in os.fsdecode."""

    seed: int
    words: list[str]
    variables: dict[str, str]
    toml: bytes


def generate(seed: int) -> Case:
    """Return a case of which all parts are strange or, for three seeds of five, one part alone: such a case
    gets past the first check."""
    chance = random.Random(seed)
    part = "all" if seed % 5 < 2 else chance.choice(["words", "variables", "file"])
    words = _line(chance) if part in ("all", "words") else chance.choice(PLAIN).split()
    variables: dict[str, str] = {}
    if part in ("all", "variables"):
        texts = {**VARIABLES, **{f"CLOUDDDP_{key}".upper(): TEXTS for _, key in _settings()}}
        variables = {name: chance.choice(found) for name, found in texts.items() if chance.random() < 0.05}
    plain = b"[cluster]\nregion = 'us-east-1'\n\n[job]\noutputs = ['runs']\n"
    toml = _toml(chance) if part in ("all", "file") else plain
    return Case(seed, [word.replace("\0", "") for word in words], variables, toml)


def _settings() -> list[tuple[str, str]]:
    return [(section, key) for section in SECTIONS for key in fields(section)]


def _line(chance: random.Random) -> list[str]:
    found = {path.removeprefix("cloudddp "): command for path, command in commands() if path != "cloudddp"}
    name = chance.choice(sorted(found.keys() - set(EXCLUDED)))
    words = [*_options(chance, main, 0.15), *name.split(), *_options(chance, found[name], 0.25)]
    return words + [_text(chance) for _ in range(chance.choice([0, 0, 0, 1, 1, 2, 5]))]


def _options(chance: random.Random, command: Any, often: float) -> list[str]:
    words: list[str] = []
    for one in command.params:
        if not one.opts[0].startswith("-") or "--sim" in one.opts or chance.random() > often:
            continue
        option, text = chance.choice(one.opts), _text(chance)
        forms = [[option]] * 9 if getattr(one, "is_flag", False) else [[option, text]] * 7 + [[option]]
        words += chance.choice([*forms, [f"{option}={text}"]])
    return words


def _text(chance: random.Random) -> str:
    letters = string.printable + "\x00\x1b\x85ü\udcff\u2028😀"
    noise = "".join(chance.choices(letters, k=chance.randint(1, 12)))
    return chance.choices([chance.choice(TEXTS), noise], [17, 3])[0]


def _toml(chance: random.Random) -> bytes:
    lines = []
    for section, key in chance.sample(_settings(), chance.randint(0, 5)):
        name = chance.choice([key] * 20 + ["nodez", "ü", "", "a.b.c", '"x"'])
        head = chance.choice(["[{}]"] * 20 + ["[[{}]]", "[{}"])
        lines += [head.format(section), f"{name} = {_value(chance)}"]
    raw = "\n".join(lines).encode("utf-8", "surrogateescape")
    spoiled = bytearray(raw)
    for _ in range(min(len(raw), chance.randint(1, 5))):
        spoiled[chance.randrange(len(spoiled))] = chance.randrange(256)
    return chance.choice([raw] * 16 + [b"\xef\xbb\xbf" + raw, raw + b"\0", *[bytes(spoiled)] * 3])


def _value(chance: random.Random) -> str:
    return f"[{chance.choice(VALUES)}]" if chance.random() < 0.2 else chance.choice(VALUES)


def outcomes(count: int, folder: Path, endpoint: str) -> Iterator[tuple[Case, int, str, str]]:
    """Run the first cases; yield each with its exit code, stdout and stderr."""
    zygote = Zygote("moto.ec2.models", "tests.support.warm")  # what every case imports
    for begin in range(0, count, _AT_ONCE):
        cases = [generate(seed) for seed in range(begin, min(begin + _AT_ONCE, count))]
        started = [_start(zygote, case, folder / str(case.seed), endpoint) for case in cases]
        for case, process in zip(cases, started, strict=True):
            out, err = process.communicate(timeout=TIMEOUT)
            yield case, process.wait(), out, err


def _start(zygote: Zygote, case: Case, folder: Path, endpoint: str) -> Process:
    project = folder / "project"
    (project / "folder").mkdir(parents=True)
    for name in ("file", "train.py", "main.py"):
        (project / name).write_text("print(1)\n")
    (project / "link").symlink_to("file")
    (project / "loop").symlink_to("loop")
    os.mkfifo(project / "fifo")
    (project / "cloudddp.toml").write_bytes(case.toml)
    own = {"HOME": str(folder), "CLOUDDDP_HOME": str(folder / "state"), "AWS_REGION": "us-east-1"}
    own |= dict.fromkeys(("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"), "x")
    own["AWS_ENDPOINT_URL"] = f"{endpoint}/{case.seed}"
    env = clean_environment(CLOUDDDP_CHECKIP_URL=f"{endpoint}/address", **own)
    words = ("-m", "cloudddp", *case.words)
    return zygote.start(words, project, {**env, **case.variables}, session=True)
