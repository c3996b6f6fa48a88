"""A small SVG plot: panels side by side, each with the same lines over the number of nodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

_COLOURS = ("steelblue", "firebrick", "seagreen", "darkorange", "purple")
_WIDTH, _HEIGHT, _ACROSS = 300, 240, 3
_LEFT, _TOP, _INNER_WIDTH, _INNER_HEIGHT = 52, 40, 225, 150


def panels(title: str, sizes: Sequence[int], content: Mapping[str, Mapping[str, Sequence[float]]]) -> str:
    """Return the plot. `content`: for each panel, the values of each line at `sizes`."""
    rows = -(-len(content) // _ACROSS)
    width, height = _WIDTH * _ACROSS + 20, _HEIGHT * rows + 60
    names = list(dict.fromkeys(name for lines in content.values() for name in lines))
    colours = dict(zip(names, _COLOURS, strict=False))
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-family="sans-serif" '
        'font-size="11">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        _text(width / 2, 20, title),
    ]
    for number, (name, colour) in enumerate(colours.items()):
        at = width / 2 + (number - len(names) / 2) * 90
        parts += [
            f'<line x1="{at:.0f}" x2="{at + 18:.0f}" y1="36" y2="36" stroke="{colour}" stroke-width="2"/>',
            _text(at + 23, 40, name, "start"),
        ]
    for number, (name, lines) in enumerate(content.items()):
        x, y = number % _ACROSS * _WIDTH, number // _ACROSS * _HEIGHT + 45
        parts.append(f'<g transform="translate({x} {y})">{_panel(name, sizes, lines, colours)}</g>')
    return "\n".join([*parts, "</svg>", ""])


def _panel(
    name: str, sizes: Sequence[int], lines: Mapping[str, Sequence[float]], colours: Mapping[str, str]
) -> str:
    top = max((value for values in lines.values() for value in values), default=0) or 1

    def x(number: int) -> float:
        return _LEFT + _INNER_WIDTH * (number + 0.5) / len(sizes)

    def y(value: float) -> float:
        return _TOP + _INNER_HEIGHT * (1 - value / top)

    parts = [
        _text(_LEFT + _INNER_WIDTH / 2, _TOP - 12, name),
        f'<path d="M{_LEFT} {_TOP}V{_TOP + _INNER_HEIGHT}H{_LEFT + _INNER_WIDTH}" fill="none" stroke="black"/>',
        *[_text(x(number), _TOP + _INNER_HEIGHT + 16, str(size)) for number, size in enumerate(sizes)],
        *[_text(_LEFT - 6, y(top * part / 4) + 4, f"{top * part / 4:.3g}", "end") for part in range(5)],
    ]
    for line, values in lines.items():
        points = " ".join(f"{x(number):.1f},{y(value):.1f}" for number, value in enumerate(values))
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colours[line]}" stroke-width="2"/>')
    return "".join(parts)


def _text(x: float, y: float, words: str, anchor: str = "middle") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{words}</text>'
