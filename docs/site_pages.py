"""For mkdocs: pages outside docs/ become pages of the site, and links to other files of the repository become
their names. A link to what does not exist fails the build."""

from __future__ import annotations

import os
import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File

ROOT = Path(__file__).parents[1]
OUTSIDE = (
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "README.md",
    "examples/classic/README.md",
    "examples/ddp/README.md",
    "examples/tutorials/README.md",
    "infra/iam/README.md",
)
_LINK = re.compile(r"(!?)\[([^]\n]*(?:\n[^]\n]*)?)\]\(([^)\s#:]+)(#[^)\s]*)?\)")


def _uri(path: str) -> str:
    """Return the name of a page in the site for a path in the repository."""
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    return "project/" + path.replace("README.md", "index.md")


def on_files(files: Any, config: Any) -> Any:
    for path in OUTSIDE:
        files.append(File.generated(config, _uri(path), content=(ROOT / path).read_text()))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    pages = {_uri(path): path for path in OUTSIDE}
    here = pages.get(page.file.src_uri, f"docs/{page.file.src_uri}")

    def link(found: re.Match[str]) -> str:
        image, text, target, anchor = found.groups()
        path = posixpath.normpath(posixpath.join(posixpath.dirname(here), target))
        if not (ROOT / path).exists():
            raise PluginError(f"{here}: {target} does not exist")
        if path in OUTSIDE or (path.startswith("docs/") and (ROOT / path).is_file()):
            relative = os.path.relpath(_uri(path), posixpath.dirname(page.file.src_uri) or ".")
            return f"{image}[{text}]({relative}{anchor or ''})"
        return f"{text} (`{path}`)" if text.strip("`") != path else f"`{path}`"

    return _LINK.sub(link, markdown)
