"""HTML that escapes every text by itself; and charts, each an SVG that is stretched to the width of the page,
with its labels as HTML around it, which stay readable on a phone. Pure."""

from __future__ import annotations

import html
import math
import re
from collections.abc import Collection

from cloudddp.job.report.series import Chart, Point, thin
from cloudddp.text import visible

_POINTS, _OF_LINE, _LINES = 6000, 800, 250  # of a chart: points, of one line at most, and lines
_COLOURS = 8
_LOGIN = re.compile(r"(://)[^/@\s'\"]+@")  # of a URL


class Html(str):
    """Text that is HTML, and not escaped again."""

    __slots__ = ()


def joined(*parts: object) -> Html:
    """Return these one after the other. What is not Html is escaped, without logins in URLs."""
    return Html("".join(map(_escaped, parts)))


def _escaped(part: object) -> str:
    if isinstance(part, Html):
        return part
    return html.escape(visible(_LOGIN.sub(r"\1****@", str(part))))


def tag(_name: str, *inside: object, **attributes: object) -> Html:
    """Return an element. In the names of attributes `_` is `-`."""
    given = "".join(f' {key.strip("_").replace("_", "-")}="{joined(one)}"' for key, one in attributes.items())
    return Html(f"<{_name}{given}>{joined(*inside)}</{_name}>")


def ticks(low: float, high: float, most: int = 5) -> list[float]:
    step = 10.0 ** math.floor(math.log10((high - low) / most))
    step *= next((one for one in (1, 2, 5) if (high - low) / (step * one) <= most), 10)
    return [number * step for number in range(math.floor(low / step), math.ceil(high / step) + 1)]


def figure(chart: Chart, marked: Collection[str] = ()) -> Html:
    """Return a chart. Of many lines only those that are `marked` have a colour."""
    many = len(chart.lines) > _COLOURS
    chosen = [name for name in chart.lines if name in marked or not many]
    colours = {name: f"c{number % _COLOURS}" for number, name in enumerate(chosen)}
    legend = [
        tag("li", tag("b", class_=colour), name, ", straggler" if name in marked else "")
        for name, colour in colours.items()
    ]
    legend += [tag("li", f"{len(chart.lines) - len(chosen)} in grey")] if many else []
    most = max(16, min(_OF_LINE, _POINTS // len(chart.lines)))
    lines = {name: thin(one, most) for name, one in chart.lines.items()}
    xs = [x for line in lines.values() for x, _ in line]
    left, right = min(xs), max(xs)
    ends = f"last {next(iter(lines.values()))[-1][1]:.4g}" if len(lines) == 1 else ""
    marks = ticks(*_range(lines.values(), chart.unit))
    scale = [tag("i", f"{y:.6g}", style=f"bottom:{_percent(y, marks):.1f}%") for y in marks]
    paths = [tag("path", d=f"M0 {100 - _percent(y, marks):.1f}h1000", class_="grid") for y in marks]
    for name in sorted(lines, key=lambda name: name in marked)[-_LINES:]:
        path = _path(lines[name], left, (right - left) or 1, marks)
        look = colours.get(name, "other") + " dot" * (len(lines[name]) == 1)
        paths.append(tag("path", tag("title", name), d=path, class_=look))
    box = {"viewBox": "0 0 1000 100", "preserveAspectRatio": "none", "role": "img", "aria_label": chart.title}
    return tag(
        "figure",
        tag("figcaption", chart.title, tag("span", " ", ", ".join(filter(None, (chart.unit, ends))))),
        tag("div", tag("div", *scale, class_="y"), tag("svg", *paths, **box), class_="plot"),
        tag("div", tag("i", f"{left:.6g}"), tag("i", chart.x), tag("i", f"{right:.6g}"), class_="x"),
        tag("ul", *legend) if len(chart.lines) > 1 else "",
    )


def _range(lines: Collection[list[Point]], unit: str) -> tuple[float, float]:
    """Return what the axis covers: from 0 on where that takes not much more space. The first tenth of the
    lines is cut off where it takes more than all the rest, as of a loss."""
    values, rest = ([y for line in lines for _, y in line[len(line) * part // 10 :]] for part in (0, 1))
    if max(rest) - min(rest) < (max(values) - min(values)) / 2:
        values = rest
    low, high = (0.0, 100.0) if unit == "%" else (min(values), max(values))
    if high - low <= max(1e-9 * abs(high), 1e-250):  # a flat line
        return (0.0, high) if high > 1e-250 else (low, low + max(abs(low), 1.0))
    return 0.0 if 0 <= low < high * 0.7 else low, high


def _percent(value: float, marks: list[float]) -> float:
    return 100 * (value - marks[0]) / (marks[-1] - marks[0])


def _path(points: list[Point], left: float, width: float, marks: list[float]) -> str:
    placed = [f"{1000 * (x - left) / width:.0f} {100 - _percent(y, marks):.1f}" for x, y in points]
    return f"M{'L'.join(placed if placed[1:] else placed * 2)}"  # round ends make a dot of a short line
