"""Charts as HTML and SVG text: stacked bars, points, lines. No scripts; values are readable without hovering."""

import html
import math
from collections.abc import Callable, Mapping, Sequence

# One colour a term, told apart also by those who see few of them (after Paul Tol's "bright" and "muted").
COLOURS = (
    "#4477aa",
    "#ee6677",
    "#228833",
    "#ccbb44",
    "#66ccee",
    "#aa3377",
    "#999933",
    "#882255",
    "#44aa99",
    "#cc6677",
    "#332288",
    "#bbbbbb",
)
STYLE = """
.bar{display:flex;align-items:center;gap:8px;margin:4px 0;font-size:.88rem}
.bar>span:first-child{width:2.2em;text-align:right;color:#5a6675}.bar>span:last-child{width:5.2em}
.track{position:relative;flex:1;height:22px;display:flex;background:#f2f4f7;border-radius:4px;overflow:hidden}
.track i{display:block;height:100%}.limit{position:absolute;top:0;bottom:0;width:2px;background:#c00}
.legend{display:flex;flex-wrap:wrap;gap:4px 14px;font-size:.85rem;margin:6px 0 10px}
.legend i{display:inline-block;width:11px;height:11px;border-radius:2px;margin-right:5px}
svg text{font:12px system-ui,sans-serif;fill:#5a6675}
.grid{display:flex;flex-wrap:wrap;gap:10px;margin-top:12px}
.domain{border:1px solid #c3ccd8;border-radius:8px;padding:6px}.domain h4{margin:0 0 4px;font-size:.8rem;color:#5a6675}
.cells{display:grid;gap:3px}
.cell{font-size:.68rem;line-height:1.25;border-radius:4px;padding:3px 5px;color:#111;white-space:nowrap}
"""
_WIDTH, _HEIGHT, _LEFT, _BOTTOM = 480, 260, 56, 40


def stacked(rows: Sequence[tuple[str, Mapping[str, float]]], words: Callable[[float], str], limit: float | None = None) -> str:
    """Bars of terms on one scale, with a legend; `limit` is marked by a line.

    Args:
      rows: (name, term -> value) of each bar.
      words: a value as text.
      limit: on the same scale.
    """
    names = [name for name in dict.fromkeys(n for _, terms in rows for n in terms) if any(t.get(name, 0) > 0 for _, t in rows)]
    colours = {name: COLOURS[index % len(COLOURS)] for index, name in enumerate(names)}
    most = max([sum(terms.values()) for _, terms in rows] + [limit or 0.0])
    legend = "".join(f'<span><i style="background:{colours[name]}"></i>{html.escape(name)}</span>' for name in names)
    mark = f'<b class=limit style="left:calc({100 * limit / most:.2f}% - 2px)"></b>' if limit else ""
    bars = []
    for label, terms in rows:
        pieces = "".join(
            f'<i style="width:{100 * terms[name] / most:.3f}%;background:{colours[name]}" title="{html.escape(name)}"></i>'
            for name in names
            if terms.get(name, 0) > 0
        )
        total = words(sum(terms.values()))
        bars.append(f"<div class=bar><span>{label}</span><div class=track>{pieces}{mark}</div><span>{total}</span></div>")
    note = f"<p class=says>The red line is what a device has: {words(limit)}.</p>" if limit else ""
    return f"<div class=legend>{legend}</div>{''.join(bars)}{note}"


def scatter(
    points: Sequence[tuple[float, float, str]], others: Sequence[tuple[float, float, str]], axes: tuple[str, str]
) -> str:
    """Points joined in the order of x, and others hollow; both from 0 on."""
    frame = _Frame([p[0] for p in (*points, *others)], [p[1] for p in (*points, *others)])
    path = " ".join(f"{frame.x(x):.1f},{frame.y(y):.1f}" for x, y, _ in sorted(points))
    dots = [f'<polyline points="{path}" fill="none" stroke="{COLOURS[0]}" stroke-width="1.5"/>']
    for group, fill in ((others, "#fff"), (points, COLOURS[0])):
        for x, y, says in group:
            at = f'cx="{frame.x(x):.1f}" cy="{frame.y(y):.1f}" r="5" fill="{fill}" stroke="{COLOURS[0]}"'
            dots.append(f"<circle {at}><title>{html.escape(says)}: {x:.4g}, {y:.4g}</title></circle>")
    return frame.draw(dots, axes)


def lines(series: Mapping[str, Sequence[tuple[float, float]]], x: str, y: str, log: bool = False) -> str:
    """One line a name, labelled at its end; x by its logarithm where asked for."""
    place = (lambda value: math.log2(value)) if log else (lambda value: value)
    every = [point for points in series.values() for point in points]
    frame = _Frame([place(a) for a, _ in every], [b for _, b in every], zero=not log)
    parts = []
    for index, (name, points) in enumerate(series.items()):
        path = " ".join(f"{frame.x(place(a)):.1f},{frame.y(b):.1f}" for a, b in points)
        colour = COLOURS[index]
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts += [f'<circle cx="{frame.x(place(a)):.1f}" cy="{frame.y(b):.1f}" r="3" fill="{colour}"/>' for a, b in points]
        parts.append(f'<text x="{_LEFT + 8}" y="{16 + 15 * index}" style="fill:{colour}">{html.escape(name)}</text>')
    ticks = [(place(a), f"{a:g}") for a in dict.fromkeys(a for a, _ in every)]
    return frame.draw(parts, (x, y), ticks)


class _Frame:
    """A plot's axes: x and y in data to places in the picture."""

    def __init__(self, xs: Sequence[float], ys: Sequence[float], zero: bool = True):
        self.low = min(0.0, *xs) if zero else min(xs)
        self.high, self.top = max(xs) * (1.05 if zero else 1) or 1.0, max(ys) * 1.15 or 1.0

    def x(self, value: float) -> float:
        return _LEFT + (value - self.low) / (self.high - self.low or 1) * (_WIDTH - _LEFT - 16)

    def y(self, value: float) -> float:
        return (_HEIGHT - _BOTTOM) * (1 - value / self.top) + 4

    def draw(self, parts: Sequence[str], axes: tuple[str, str], ticks: Sequence[tuple[float, str]] | None = None) -> str:
        """The picture; ticks of x are round numbers unless given."""
        across = ticks or [(value, f"{value:g}") for value in round_ticks(self.high)]
        marks = [
            f'<text x="{self.x(v):.1f}" y="{_HEIGHT - _BOTTOM + 18}" text-anchor="middle">{says}</text>' for v, says in across
        ]
        for value in round_ticks(self.top):
            marks.append(f'<text x="{_LEFT - 6}" y="{self.y(value) + 4:.1f}" text-anchor="end">{value:g}</text>')
            marks.append(
                f'<line x1="{_LEFT}" x2="{_WIDTH - 16}" y1="{self.y(value):.1f}" y2="{self.y(value):.1f}" stroke="#e6eaf0"/>'
            )
        turned = f'transform="rotate(-90 14 {_HEIGHT / 2})"'
        names = (
            f'<text x="{(_LEFT + _WIDTH) / 2}" y="{_HEIGHT - 4}" text-anchor="middle">{html.escape(axes[0])}</text>'
            f'<text x="14" y="{_HEIGHT / 2}" text-anchor="middle" {turned}>{html.escape(axes[1])}</text>'
        )
        style = f'style="width:100%;max-width:{_WIDTH + 120}px"'
        return f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" {style} role="img">{"".join(marks)}{names}{"".join(parts)}</svg>'


def round_ticks(top: float) -> list[float]:
    """Round numbers from 0 to below `top`, about five."""
    step = 10 ** math.floor(math.log10(top / 4))
    step *= next(times for times in (1, 2, 5, 10) if top / (step * times) <= 6)
    return [round(index * step, 12) for index in range(int(top / step) + 1)]
