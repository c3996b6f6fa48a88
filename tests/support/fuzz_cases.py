"""Random command lines, environments and configuration files, each made from a seed. Runs nothing."""

from __future__ import annotations

import random
import string
from dataclasses import dataclass
from typing import Any

# Texts for every option, argument and setting: numbers, characters, what a shell or a format would act on,
# and words that some setting takes.
TEXTS = [
    *["", " ", "\n", "a\nb", "\t", "\r", "g5.xlarge ", "; id", "| id", "A\n=B", '{"throttle": 1}'],
    *["9" * 5000, "1" + "0" * 400, "a" * 300, "b" * 70000, "a" * 64, '{"a": ' * 3000],
    *["\x01", "\x1b[31mred", "\x1b]0;title\x07", "\x7f", "\x9b31m", "\udcff\udcfe", "a\udc80", "A=\udcff"],
    *["ü", "日本", "e\u0301", "\u202egnp.exe", "\u200b", "\ufeff", "😀", "½", "٣"],
    *"- -- -1 --help 0 1 2 +1 1e9 1e400 -0.0 nan inf -inf 11111111111111111111 0x10 1_000".split(),
    *"' \" '\"'\"' $(id) `id` * ~ ~nobody-here/x %s %n%n {} {0} . .. ../../x a/b a//b ./a \\ \\n".split(),
    *"train.py train.py:0 main -m @file @ = A= =A A=B A=B=C 1A=B RANK=1 2x8 gpu 1,1 4,2 , ,, 1, true".split(),
    *"false null c10d g5.xlarge G5.XLARGE p4d.24xlarge t2.micro us-east-1 us-east-1a US-EAST-1".split(),
    *"eu-nowhere-9 ami-0 /aws/service/x 0.0.0.0/0 1.2.3.4/33 ::/0 203.0.113.7/32 i-0 node default {".split(),
    *"[] 2026-01-01 subnet-0 vpc-0".split(),
]
PATHS = [
    *"missing missing/deep folder folder/ file file/x unreadable link loop dangling fifo null".split(),
    *"cloudddp.toml odd.toml /dev/null /dev/null/x /dev/full /dev/zero /nowhere/at/all".split(),
    *["/proc/self/mem", "deep/" * 30, "n" * 300, "\udcff", "new\nline"],
]
PLAIN = """\
up -y; up -y -n 2 -t g5.xlarge --max-hours 1; up -y --spot --max-cost 5; up; down -y; down; status
status --json; ls; ls --json; launch train.py; launch -d train.py --lr 1; launch -m main; run -y train.py
run -y -n 2 -m main a b; jobs; jobs --json; logs; logs -f; logs --rank 0; cancel; sync; pull; pull runs
pull --to out; exec -- id; exec id; ssh; ssh 0 id; init; init new; init --example new
init --example trainer new; allow-me; extend --hours 1; extend --until 18:00; cost; cost --json
sim status; sim stop; sim env; sim fault kill 0; sim interrupt 0
sim conditions; --version; --help; up --help; sim --help""".replace("\n", "; ").split("; ")
VARIABLES = {
    "HOME": ["", "missing", "file", "\udcff", "/nowhere"],
    "LANG": ["C", "", "nonsense", "tr_TR.UTF-8"],
    "LC_ALL": ["C", "POSIX", "x" * 300],
    "TERM": ["", "dumb", "xterm-256color", "\x1b"],
    "COLUMNS": ["0", "-1", "1", "x", "9" * 40, "\udcff"],
    "TMPDIR": ["missing", "file", ""],
    "USER": ["", "\udcff", "a\nb", "x" * 400],
    "AWS_REGION": ["", "us-east-1\n", "\udcff", "nowhere", "x" * 300, "../.."],
    "AWS_DEFAULT_REGION": ["", "us-east-1", "ü"],
    "AWS_PROFILE": ["", "missing", "\n", "\udcff"],
    "AWS_CONFIG_FILE": ["missing", "folder", "odd.toml", "loop"],
    "AWS_SHARED_CREDENTIALS_FILE": ["missing", "folder", "odd.toml", "loop"],
    "AWS_ACCESS_KEY_ID": ["", "\udcff", "a\nb", "ü", "x" * 5000],
    "AWS_SECRET_ACCESS_KEY": ["", "\udcff", "ü"],
    "AWS_ENDPOINT_URL": [
        *["", "nonsense", "http://", "file:///etc/passwd", "http://127.0.0.1:99999", "\udcff", "http://[::1"]
    ],
    "AWS_CA_BUNDLE": ["missing", "folder", "file"],
    "AWS_DATA_PATH": ["missing", "file", "\udcff"],
    "AWS_RETRY_MODE": ["", "nonsense"],
    "AWS_MAX_ATTEMPTS": ["", "0", "-1", "x"],
    "CLOUDDDP_CHECKIP_URL": ["", "nonsense", "file:///etc/passwd", "http://127.0.0.1:1/\n"],
    "CLOUDDDP_CONFIG": PATHS,
    "CLOUDDDP_HOME": ["", "state", *PATHS],
    "CLOUDDDP_PROFILE": ["", "missing"],
    "CLOUDDDP_YES": ["", "1", "maybe", "\udcff"],
    "CLOUDDDP_SIM_NODES": ["", "nonsense"],
    **{f"CLOUDDDP_{name}": ["x"] for name in ("CLUSTR", "", "\udcff", "\n")},
    **{name: ["1"] for name in ("NO_COLOR", "FORCE_COLOR")},
    "PAGER": ["", "missing"],
    "COMP_WORDS": ["cloudddp "],
}
VALUES = [  # of keys in the file
    *'1 0 -1 4 0x7f 1.5 nan inf -inf 1e400 true false "" "x" "gpu" "c10d" "us-east-1"'.split(),
    *'"g5.xlarge" "\\u001b[31m" "\\u0000" "\\u202e" "\\ud800" "\\U0010ffff" 2026-01-01'.split(),
    *"2026-01-01T00:00:00Z 12:00:00 9999-99-99 [] {} unquoted \udcff".split(),
    *["'''\n\n'''", '["a", 1]', '["a\\nb", ""]', "{ A = 'B' }", "{ A = 1 }", "{ '' = '' }", "{ RANK = '1' }"],
    *["9" * 400, "9" * 5000, "0x" + "f" * 9000, '"' + "a" * 70000 + '"'],
    *["[" * 3000, "[" * 60 + "]" * 60, "{ a = " * 60 + "1" + "}" * 60],
]
TOML_KINDS = ["none", "folder", "loop", "dangling", "fifo", "null", "unreadable"]
# They run any program, or start a process that must be ended.
EXCLUDED = ("sim start", "sim shell", "sim exec")


@dataclass
class Case:
    """A case made from a seed. Strings stand for bytes, as in os.fsdecode."""

    seed: int
    words: list[str]
    variables: dict[str, str | None]
    toml: bytes | None
    toml_is: str
    stdin: bytes = b""
    cwd: str = ""
    git: str = ""


def generate(seed: int) -> Case:
    """Return a case of which all parts are strange or, for three seeds of five, one part alone: such a case
    gets past the first check."""
    chance = random.Random(seed)
    part = "all" if seed % 5 < 2 else chance.choice(["words", "variables", "file", "folder"])
    words = _line(chance) if part in ("all", "words") else _plain_line(chance)
    variables: dict[str, str | None] = {}
    if part in ("all", "variables"):
        often = 0.03 if part == "all" else 0.06
        texts = {**VARIABLES, **dict.fromkeys(map(_variable, _settings()), TEXTS)}
        variables = {name: chance.choice(found) for name, found in texts.items() if chance.random() < often}
        if chance.random() < 0.05:
            variables["HOME"] = None
    toml, kind = b"[cluster]\nregion = 'us-east-1'\n\n[job]\noutputs = ['runs']\n", "file"
    if part in ("all", "file"):
        toml, kind = _toml(chance), chance.choice(["file"] * 12 + ["none"] * 5 + TOML_KINDS)
    somewhere = part in ("all", "folder")
    return Case(
        seed=seed,
        words=[word.replace("\0", "") for word in words],
        variables=variables,
        toml=toml if kind == "file" else None,
        toml_is=kind,
        stdin=chance.choice([b"", b"y\n", b"n\n", b"\xff\n", b"\0" * 100]),
        cwd=chance.choice([""] * 20 + ["folder"] * 3) if somewhere else "",
        git=chance.choice([""] * 5 + ["folder"] * 3 + ["file", "loop"]) if somewhere else "",
    )


def _commands() -> dict[str, Any]:
    """Return every command by its words ('sim status')."""
    from support.commands import commands

    found = {path.removeprefix("cloudddp "): command for path, command in commands() if path != "cloudddp"}
    return {name: command for name, command in found.items() if name not in EXCLUDED}


def _settings() -> list[tuple[str, str]]:
    from cloudddp.config.schema import SECTIONS, fields

    return [(section, key) for section in SECTIONS for key in fields(section)]


def _variable(setting: tuple[str, str]) -> str:
    section, key = setting
    return f"CLOUDDDP_{section}_{key}".upper() if section in ("sync", "setup") else f"CLOUDDDP_{key}".upper()


def _line(chance: random.Random) -> list[str]:
    from cloudddp.cli.main import main

    commands = _commands()
    name = chance.choice(sorted(commands))
    words = [*_options(chance, main, 0.15), *name.split(), *_options(chance, commands[name], 0.25)]
    words += [_text(chance) for _ in range(chance.choice([0, 0, 0, 1, 1, 2, 5]))]
    if chance.random() < 0.1:
        chance.shuffle(words)
    return words


def _plain_line(chance: random.Random) -> list[str]:
    """Return a plausible command line."""
    words = chance.choice(PLAIN).split()
    if words[0] in ("up", "run", "launch", "down") and chance.random() < 0.3:
        words.insert(1, "--dry-run")
    if chance.random() < 0.3:
        words.insert(1, chance.choice(["-v", "--cluster=x", "--region=eu-west-1", "--profile=missing"]))
    if (command := _commands().get(words[0])) and chance.random() < 0.4:
        words[1:1] = _options(chance, command, 0.05)
    return words


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
    return chance.choices([chance.choice(TEXTS), chance.choice(PATHS), noise], [12, 5, 3])[0]


def _toml(chance: random.Random) -> bytes:
    lines = [f"{chance.choice(['cluster', 'job', 'nodes', 'x'])} = 1"] if chance.random() < 0.1 else []
    heads = ["[{}]"] * 20 + ["[[{}]]", "[{}.x]", "[{}"]
    for section, key in chance.sample(_settings(), chance.randint(0, 5)):
        name = chance.choice([key] * 20 + ["nodez", "ü", "", "a.b.c", '"x"'])
        lines += [chance.choice(heads).format(section), f"{name} = {_value(chance)}"]
    raw = chance.choice(["\n", "\n", "\r\n"]).join(lines).encode("utf-8", "surrogateescape")
    spoiled = bytearray(raw)
    for _ in range(min(len(raw), chance.randint(1, 5))):
        spoiled[chance.randrange(len(spoiled))] = chance.randrange(256)
    utf_16 = raw.decode(errors="replace").encode("utf-16")
    harmed = [b"\xef\xbb\xbf" + raw, raw + b"\0", utf_16, bytes(spoiled), bytes(spoiled)]
    return chance.choice([raw] * 16 + harmed)


def _value(chance: random.Random) -> str:
    if chance.random() < 0.2:
        return f"[{', '.join(chance.choices(VALUES, k=chance.randint(0, 3)))}]"
    return chance.choice(VALUES)
