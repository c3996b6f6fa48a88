"""The files of a project that go to the nodes, at one moment. Files that a job writes on a node are in no
manifest, so they are never touched. Files that hold secrets by their names are withheld at any depth, unless
git tracks them or sync.include has their exact path: a .gitignore does not always name them."""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import os
import posixpath
import re
import stat
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from cloudddp import timings
from cloudddp.agent.protocol.manifest import (
    FILE,
    LINK,
    MAX_FILES,
    Entry,
    Manifest,
    entry_of,
    manifest_digest,
    manifest_to_wire,
)
from cloudddp.config import package_inputs, packages, project, spec
from cloudddp.config.spec import Config
from cloudddp.errors import UsageError
from cloudddp.files import resolved
from cloudddp.job import file_listing

MAX_LINKS = 40  # on the way to a file, as in Linux

RESULTS = spec.RESULTS

# In the syntax of .gitignore, for names in lower case. docs/security.md explains them to users.
SECRETS = tuple(
    word
    for line in """
    # variables
    .env .env.* *.env .envrc secrets.yaml secrets.yml secrets.json secrets.toml
    # private keys and key stores
    id_rsa id_dsa id_ecdsa id_ed25519 id_rsa_* id_dsa_* id_ecdsa_* id_ed25519_* .ssh/ .gnupg/ *.pem
    *.key *.ppk *.p12 *.pfx *.jks *.keystore *.kdbx
    # clouds and clusters
    .aws/ .azure/ .oci/ .kube/ **/.config/gcloud/ .boto .s3cfg .databrickscfg .vault-token
    application_default_credentials.json service-account*.json service_account*.json client_secret*.json
    *.tfstate *.tfstate.* *.tfvars *.tfvars.json rclone.conf
    # registries, git hosts and other services
    **/.docker/config.json .dockercfg .netrc _netrc .git-credentials **/.config/gh/ .pypirc .npmrc
    **/.cargo/credentials **/.cargo/credentials.toml .pgpass .my.cnf .htpasswd
    .modal.toml
    # model and data hubs
    **/huggingface/token **/huggingface/stored_tokens **/.huggingface/token kaggle.json
    # histories of shells and interpreters
    .*_history .rhistory fish_history
    """.splitlines()
    for word in line.partition("# ")[0].split()
)

_HEAD = 1 << 20  # bytes in which a private key is looked for


def _is_certificate(path: Path) -> bool:
    """Return whether a .pem file has no private key: certificates are public."""
    if path.suffix.lower() != ".pem":
        return False
    try:
        with path.open("rb") as file:
            return b"PRIVATE KEY" not in file.read(_HEAD)
    except OSError:
        return False


@dataclass(frozen=True)
class ProjectFiles:
    """The project's files on this computer, at one moment."""

    root: Path
    manifest: Manifest
    withheld: tuple[str, ...] = ()  # files and folders that may hold secrets, which are not sent
    unsent: tuple[str, ...] = ()  # files that git tracks, and that are not sent
    unfetched: tuple[str, ...] = ()  # submodules without a checkout
    ignored: tuple[str, ...] | None = None  # by .gitignore; None in a repository, where git knows
    # Folders of [[data]] and of setup.wheels, which sync.max_mb does not count: path in the project -> here.
    data: Mapping[str, Path] = field(default_factory=dict)

    def is_data(self, name: str) -> bool:
        return file_listing.is_below(name, self.data)

    def locate(self, name: str) -> str:
        """Return where a file is here: relative to `root`, or absolute for data from elsewhere."""
        for place, folder in self.data.items():
            if file_listing.is_below(name, [place]):
                return f"{folder}{name[len(place) :]}"
        return name

    def there(self, name: str) -> str | None:
        """Return where a path leads in the project on the nodes, through sent links; None where it leaves
        that."""
        rest, links = name.split("/"), 0
        found: list[str] = []
        while rest:
            part = rest.pop(0)
            if part in ("", "."):
                continue
            if part == "..":
                if not found:
                    return None
                found.pop()
                continue
            entry = self.manifest.get("/".join([*found, part]))
            if entry is None or entry.kind != LINK:
                found.append(part)
                continue
            links += 1
            if links > MAX_LINKS or entry.target.startswith("/"):
                return None
            rest = entry.target.split("/") + rest
        return "/".join(found)

    @functools.cached_property
    def digest(self) -> str:
        """Equal for equal manifests; a node computes the same."""
        return manifest_digest(manifest_to_wire(self.manifest))


@timings.span("project files")
def of_config(root: Path, config: Config, *, secret_files: Iterable[Path] = ()) -> ProjectFiles:
    """Return the project's files that the settings select for the nodes. `secret_files` are withheld wherever
    they are. Raises UsageError where there are none, or too many, and for a folder that is no project."""
    project.require(root)
    secret_files = tuple(secret_files)
    files = snapshot(root, config, names_below(root, secret_files))
    files = _with_data(files, _data_folders(root, config), secret_files)
    _refuse_in_place_of(files, config.links)  # on the nodes, data from S3 and shared folders are links
    if not files.manifest:
        raise UsageError(f"{root} has no files to send", hint="run cloudddp in your project's folder")
    if len(files.manifest) > MAX_FILES:
        folders = Counter(name.split("/")[0] + "/" * ("/" in name) for name in files.manifest).most_common(3)
        raise UsageError(
            f"the project has {len(files.manifest):,} files, more than {MAX_FILES:,}: "
            + "; ".join(f"{name} {count:,}" for name, count in folders),
            hint="add what is not needed on the nodes to .gitignore or sync.exclude",
        )
    return files


def _data_folders(root: Path, config: Config) -> dict[str, Path]:
    """Return the local folders of [[data]] and of wheels, by their path in the project. Raises UsageError."""
    found: dict[str, Path] = {}
    for one in config.data:
        if one.is_s3:
            continue
        folder = root / one.source
        with contextlib.suppress(RuntimeError):  # ~NAME, and there is no such user
            folder = root / Path(one.source).expanduser()
        found[one.place] = folder
        if not folder.is_dir():
            raise UsageError(
                f"[[data]] source = {json.dumps(one.source)} is not a folder",
                hint="correct it in cloudddp.toml; its path is relative to the project",
            )
        if kind := project.holds_more(resolved(folder)):
            raise UsageError(
                f"[[data]] source = {json.dumps(one.source)} is {kind}", hint="name a folder in it"
            )
    if config.setup.wheels:
        found[posixpath.normpath(config.setup.wheels)] = folder = root / config.setup.wheels
        if not folder.is_dir():
            fills = packages.download(config.setup, package_inputs.read(root, config.setup))
            raise UsageError(
                f"setup.wheels = {json.dumps(config.setup.wheels)} is not a folder in {root}",
                hint=f"`{fills}` fills it",
            )
    return found


def _with_data(files: ProjectFiles, data: Mapping[str, Path], secret_files: Iterable[Path]) -> ProjectFiles:
    """Return a snapshot that has every file of these folders, too, whatever git ignores, except for secrets.
    Raises UsageError for what cannot be sent, and for data in the place of the project's own files."""
    if not data:
        return files
    elsewhere = [place for place, folder in data.items() if resolved(folder) != resolved(files.root / place)]
    _refuse_in_place_of(files, elsewhere)
    manifest = {name: one for name, one in files.manifest.items() if not file_listing.is_below(name, data)}
    withheld = set(files.withheld)
    for place, folder in data.items():
        listed = file_listing.Listed()
        file_listing.include_ignored(listed, folder, lambda _: True, _refuse_unreadable)
        secrets = _secrets(folder, listed, listed.files, names_below(folder, secret_files))
        withheld |= {f"{place}/{name}" for name in secrets.values()}
        for name in listed.files.keys() - secrets.keys():
            if (entry := _describe(f"{folder}/", name)) is not None:
                manifest[f"{place}/{name}"] = entry
    return replace(
        files,
        manifest=dict(sorted(manifest.items())),
        withheld=tuple(sorted(withheld)),
        unsent=tuple(name for name in files.unsent if not file_listing.is_below(name, data)),
        data=data,
    )


def _refuse_in_place_of(files: ProjectFiles, places: Iterable[str]) -> None:
    for place in places:
        for name in files.manifest:
            if file_listing.is_below(name, [place]) or file_listing.is_below(place, [name]):
                raise UsageError(
                    f"[[data]] or [[shared]] would be at {place}, where the project has {name}",
                    hint='give another path = "FOLDER"',
                )


def _refuse_unreadable(error: OSError) -> None:
    text = f"[[data]]: cannot read {error.filename}: {error.strerror}"
    raise UsageError(text, hint="make it readable, or move it elsewhere")


def names_below(root: Path, paths: Iterable[Path]) -> frozenset[str]:
    """Return those of the paths that are in a project, relative to it."""
    base = root.resolve()
    # A link to one is not sent either.
    found = (path for one in paths for path in (one.absolute(), one.resolve()))
    return frozenset(path.relative_to(base).as_posix() for path in found if path.is_relative_to(base))


def snapshot(root: Path, config: Config, secret: Collection[str] = ()) -> ProjectFiles:
    """Return the files of a project, without [[data]]. `secret`: paths that are withheld as `.env` is. Raises
    UsageError for what cannot be sent: a socket, a pipe, a device, an unreadable file."""
    exclude, include = config.sync.exclude, config.sync.include
    for key, patterns in (("exclude", exclude), ("include", include)):
        for number, pattern in enumerate(patterns):
            if not file_listing.is_pattern(pattern):
                raise UsageError(
                    f"sync.{key}: {pattern!r} is not a pattern", hint="remove it, or see `man gitignore`"
                )
            if pattern.startswith("!") and all(one.startswith("!") for one in patterns[:number]):
                raise UsageError(
                    f"sync.{key}: {pattern!r} has no effect: no pattern before it matches anything",
                    hint=f"to send files that .gitignore names: [sync] include = [{json.dumps(pattern[1:])}]",
                )
    base = f"{root}/"  # to join Paths takes longer than to look at the files
    excluded = file_listing.matcher((*file_listing.NEVER_SENT, *exclude))
    # "./runs/" is "runs".
    outputs = [posixpath.normpath(out) for out in (*config.job.not_sent, RESULTS)]
    listed = file_listing.list_files(root)
    if include:
        file_listing.include_ignored(listed, root, file_listing.matcher(include))
    left_out = {name for name in listed.files if excluded(name) or file_listing.is_below(name, outputs)}
    names = listed.files.keys() - left_out
    unsent = [name for name in left_out if listed.files[name] and os.path.lexists(base + name)]
    if unsent:
        unsent = sorted(itertools.filterfalse(file_listing.matcher(exclude), unsent))  # those were meant
    withheld = _secrets(root, listed, [name for name in names if name not in include], secret)
    described = ((name, _describe(base, name)) for name in sorted(names - withheld.keys()))
    return ProjectFiles(
        root,
        {name: entry for name, entry in described if entry is not None},
        withheld=tuple(sorted({*withheld.values()})),
        unsent=tuple(unsent),
        unfetched=tuple(sorted(listed.unfetched)),
        ignored=None if listed.ignored is None else tuple(listed.ignored),
    )


def _secrets(
    root: Path, listed: file_listing.Listed, names: Iterable[str], known: Collection[str]
) -> dict[str, str]:
    """Return the files to withhold: `known` ones, and those that hold secrets by their names, unless git
    tracks them. The value is the file, or the folder that has such a name."""
    matches = file_listing.matcher(SECRETS)
    found = {}

    def is_secret(name: str) -> bool:
        return matches(name.lower())

    for name in names:
        if not (name in known or is_secret(name)) or listed.files[name]:
            continue
        if name not in known and _is_certificate(root / name):
            continue
        parents = (name[: slash.start() + 1] for slash in re.finditer("/", name))
        found[name] = next((parent.rstrip("/") for parent in parents if is_secret(parent)), name)
    return found


def _describe(base: str, name: str) -> Entry | None:
    path = base + name
    try:
        info = os.lstat(path)
        entry = entry_of(info, os.readlink(path) if stat.S_ISLNK(info.st_mode) else "")  # noqa: PTH115
    except FileNotFoundError:
        return None  # tracked by git, deleted here
    except OSError as error:
        raise UsageError(f"{name!r} cannot be sent to the nodes: {error.strerror}") from None
    if entry is None:
        kind = _KINDS.get(stat.S_IFMT(info.st_mode), "device")
        text = f"{name!r} cannot be sent to the nodes: it is a {kind}"
        raise UsageError(text, hint="remove it, or add it to .gitignore or sync.exclude")
    # Almost every file is this user's own, and readable: that takes one system call less.
    is_own = info.st_uid == os.geteuid() and info.st_mode & stat.S_IRUSR
    if entry.kind == FILE and not is_own and not os.access(path, os.R_OK):
        raise UsageError(f"{name!r} cannot be sent to the nodes: permission denied")
    return entry


_KINDS = {stat.S_IFSOCK: "socket", stat.S_IFIFO: "named pipe", stat.S_IFDIR: "folder"}
