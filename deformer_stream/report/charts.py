"""Charts for the pages of `html`: inline SVG in a figure with its title, legend and a description for screen readers.

Every function is pure; names and labels are escaped, numbers that are not finite are left out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from deformer_stream.report.html import number, text

WIDTH = 660  # of every chart, in SVG user units; the page scales it
_TINY = 1e-290  # smaller numbers are drawn as zero
_DASHES = ("", "7 4", "2 4", "9 3 2 3")  # series differ by more than colour


def nice_ticks(low: float, high: float, count: int = 6) -> list[float]:
    """About `count` round values (steps of 1, 2, 2.5 or 5 times a power of ten) within [low, high], or around it
    where it is too narrow."""
    low, high = _interval(low, high)
    raw = (high - low) / max(count, 1)
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(m for m in (1.0, 2.0, 2.5, 5.0, 10.0) if m * power >= 0.75 * raw) * power
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [0.0 if k == 0 else float(f"{k * step:.12g}") for k in range(first, last + 1)]


def _interval(low: float, high: float) -> tuple[float, float]:
    """The same interval, widened where it is too narrow to be drawn."""
    size = max(abs(low), abs(high))
    if not high - low > max(1e-9 * size, _TINY):
        half = 0.5 * size if size > _TINY else 1.0
        return low - half, high + half
    return low, high


@dataclass(frozen=True, slots=True)
class _Axis:
    """Values → SVG units along one axis. `ticks` are values; `names` their texts."""

    low: float
    high: float
    start: float
    end: float
    ticks: list[float]
    names: list[str]
    log: bool = False

    def __call__(self, value: float) -> float:
        low, high, v = (
            (math.log10(x) for x in (self.low, self.high, value)) if self.log else (self.low, self.high, value)
        )
        return round(self.start + (v - low) / (high - low) * (self.end - self.start), 2)


def _axis(low: float, high: float, start: float, end: float, unit: str, snug: bool, log: bool = False) -> _Axis:
    """snug: the axis ends where the data end; otherwise at the enclosing ticks. unit: put after every number; "%" shows
    shares as percentages."""
    if log:
        low, high = (low, high) if high > low * (1 + 1e-9) else (low / 3, high * 3)
        decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        marks = (1, 2, 5) if len(decades) <= 4 else (1,)
        inside = [m * 10.0**d for d in decades for m in marks if low <= m * 10.0**d <= high]
        return _Axis(low, high, start, end, inside, [_with_unit(number(t, 2), unit) for t in inside], True)
    low, high = _interval(low, high)
    if not snug:
        step = np.diff(nice_ticks(low, high)[:2]).max(initial=0.0)
        if step > 0:
            low, high = math.floor(low / step + 1e-9) * step, math.ceil(high / step - 1e-9) * step
    ticks = nice_ticks(low, high)
    factor = 100.0 if unit == "%" else 1.0
    return _Axis(low, high, start, end, ticks, [_with_unit(number(factor * t, 6), unit) for t in ticks])


def _with_unit(number: str, unit: str) -> str:
    return number + ("" if unit in ("", "%") else "\u202f") + unit


def _frame(x: _Axis, y: _Axis, x_label: str, y_label: str) -> str:
    """Grid, ticks and labels. The vertical axis is named on top, where it reads without turning the head."""
    parts = [f'<text x="12" y="{y.end - 14:g}">{text(y_label)}</text>'] if y_label else []
    for value, name in zip(y.ticks, y.names, strict=True):
        parts.append(f'<line class="grid" x1="{x.start}" x2="{x.end}" y1="{y(value)}" y2="{y(value)}"/>')
        parts.append(f'<text x="{x.start - 8}" y="{y(value) + 4:g}" text-anchor="end">{text(name)}</text>')
    for value, name in zip(x.ticks, x.names, strict=True):
        parts.append(f'<line class="axis" x1="{x(value)}" x2="{x(value)}" y1="{y.start}" y2="{y.start + 4}"/>')
        parts.append(f'<text x="{x(value)}" y="{y.start + 19}" text-anchor="middle">{text(name)}</text>')
    parts.append(f'<line class="axis" x1="{x.start}" x2="{x.end}" y1="{y.start}" y2="{y.start}"/>')
    middle = (x.start + x.end) / 2
    parts.append(f'<text x="{middle:g}" y="{y.start + 40}" text-anchor="middle">{text(x_label)}</text>')
    return "".join(parts)


def _figure(title: str, drawing: str, height: float, describe: str, legend: Sequence[str] = ()) -> str:
    keys = "".join(
        f'<li><svg class="key" viewBox="0 0 28 10" aria-hidden="true"><line class="curve s{i % 6}" '
        f'x1="1" x2="27" y1="5" y2="5" stroke-dasharray="{_DASHES[i % 4]}"/></svg>{text(name)}</li>'
        for i, name in enumerate(legend)
    )
    return (
        f"<figure><figcaption>{text(title)}</figcaption>"
        + (f'<ul class="legend">{keys}</ul>' if len(legend) > 1 else "")
        + f'<div class="scroll" tabindex="0" role="region" aria-label="{text(title)}">'
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" viewBox="0 0 {WIDTH} {height:g}" '
        f'aria-label="{text(describe)}">'
        f"{drawing}</svg></div></figure>"
    )


def _empty(title: str) -> str:
    return _figure(title, f'<text x="{WIDTH / 2}" y="40" text-anchor="middle">no data</text>', 70, f"{title}: no data")


def _finite(values: ArrayLike) -> NDArray[np.float64]:
    v = np.asarray(values, np.float64).reshape(-1)
    return np.where(np.abs(v) < 1e300, v, np.nan)


def line_chart(
    series: Mapping[str, tuple[ArrayLike, ArrayLike]],
    x_label: str,
    y_label: str,
    title: str,
    log_x: bool = False,
    horizontal: Mapping[str, float] | None = None,
    *,
    vertical: Mapping[str, float] | None = None,
    x_unit: str = "",
    y_unit: str = "",
    y_zero: bool = False,
    marks: bool = False,
    steps: bool = False,
) -> str:
    """Curves over a common axis.

    series: name → (xs, ys) of one length, in drawing order; a NaN breaks its curve. horizontal, vertical: named
    rules, such as a threshold. x_unit, y_unit: put after every tick ("%" shows shares as percentages). y_zero: the
    vertical axis includes zero. marks: a dot at every point. steps: values hold until the next x. Raises ValueError
    where xs and ys differ in length.
    """
    data = {name: (_finite(xs), _finite(ys)) for name, (xs, ys) in series.items()}
    for name, (xs, ys) in data.items():
        if len(xs) != len(ys):
            raise ValueError(f"series {name!r} has {len(xs)} x values and {len(ys)} y values")
    if log_x:
        data = {name: (np.where(xs > _TINY, xs, np.nan), ys) for name, (xs, ys) in data.items()}
    across = {name: v for name, v in (horizontal or {}).items() if math.isfinite(v)}
    upright = {name: v for name, v in (vertical or {}).items() if math.isfinite(v) and (v > _TINY or not log_x)}
    good = {name: np.isfinite(xs) & np.isfinite(ys) for name, (xs, ys) in data.items()}
    if not any(keep.any() for keep in good.values()):
        return _empty(title)
    all_x = np.concatenate([xs[good[name]] for name, (xs, _) in data.items()] + [np.array(list(upright.values()))])
    all_y = np.concatenate([ys[good[name]] for name, (_, ys) in data.items()] + [np.array(list(across.values()))])
    y = _axis(min(all_y.min(), 0.0 if y_zero else math.inf), all_y.max(), 262, 34, y_unit, snug=False)
    x = _axis(all_x.min(), all_x.max(), _left(y), WIDTH - 20, x_unit, snug=True, log=log_x)
    parts = [_frame(x, y, x_label, y_label)]
    for i, (name, (xs, ys)) in enumerate(data.items()):
        look = f'class="curve s{i % 6}" style="fill:none" stroke-dasharray="{_DASHES[i % 4]}"'
        parts.append(f'<path {look} d="{_path(xs, ys, x, y, steps)}"/>')
        if marks:
            dots = zip(xs[good[name]].tolist(), ys[good[name]].tolist(), strict=True)
            parts += [f'<circle class="s{i % 6}" cx="{x(a)}" cy="{y(b)}" r="3"/>' for a, b in dots]
    parts += [_rule(name, x.start, x.end, y(v), y(v)) for name, v in across.items()]
    parts += [_rule(name, x(v), x(v), y.start, y.end) for name, v in upright.items()]
    describe = f"{title}: {y_label} against {x_label} for {', '.join(data)}"
    return _figure(title, "".join(parts), 312, describe, list(data))


def _left(y: _Axis) -> float:
    """Where the drawing begins: right of the numbers of the vertical axis."""
    return max(48.0, 18 + 7.6 * max(map(len, y.names), default=0))


def _path(xs: NDArray[np.float64], ys: NDArray[np.float64], x: _Axis, y: _Axis, steps: bool) -> str:
    out, pen_down, last = [], False, 0.0
    for a, b in zip(xs.tolist(), ys.tolist(), strict=True):
        if not (math.isfinite(a) and math.isfinite(b)):
            pen_down = False
            continue
        if pen_down and steps:
            out.append(f"L{x(a):g} {last:g}")
        last = y(b)
        out.append(f"{'L' if pen_down else 'M'}{x(a):g} {last:g}")
        pen_down = True
    return "".join(out)


def _rule(name: str, x1: float, x2: float, y1: float, y2: float) -> str:
    """A named line; the name stands above a horizontal one at its right end, beside a vertical one at its top."""
    flush_left = x1 == x2 and x1 < WIDTH / 2
    at = (x1 + 6, y2 + 10) if flush_left else (x2 - 6, y2 + 10) if x1 == x2 else (x2, y1 - 6)
    anchor = "start" if flush_left else "end"
    line = f'<line class="rule" x1="{x1}" x2="{x2}" y1="{y1}" y2="{y2}"/>'
    return f'{line}<text class="rule" x="{at[0]:g}" y="{at[1]:g}" text-anchor="{anchor}">{text(name)}</text>'


def bar_chart(labels: Sequence[str], values: ArrayLike, title: str, x_label: str = "", *, unit: str = "") -> str:
    """Horizontal bars from zero, one per label, in the given order, each with its number. unit: as in `line_chart`."""
    v = _finite(values)
    if len(v) != len(labels):
        raise ValueError(f"{len(labels)} labels for {len(v)} values")
    if not np.isfinite(v).any():
        return _empty(title)
    names = [label if len(label) <= 30 else label[:29] + "…" for label in map(str, labels)]
    left = 24 + min(7.5 * max(map(len, names)), 230)
    bottom = 12 + 26 * len(v)
    low, high = min(0.0, float(np.nanmin(v))), max(0.0, float(np.nanmax(v))) or float(not np.nanmin(v))
    x = _axis(low, high, left + (70 if low < 0 else 0), WIDTH - 70, unit, snug=True)
    parts = [
        f'<line class="grid" x1="{x(t)}" x2="{x(t)}" y1="8" y2="{bottom}"/>'
        f'<text x="{x(t)}" y="{bottom + 18}" text-anchor="middle">{text(name)}</text>'
        for t, name in zip(x.ticks, x.names, strict=True)
    ]
    factor = 100.0 if unit == "%" else 1.0
    for i, (name, value) in enumerate(zip(names, v.tolist(), strict=True)):
        top = 12 + 26 * i
        parts.append(f'<text class="strong" x="{left - 10}" y="{top + 15}" text-anchor="end">{text(name)}')
        parts.append(f"<title>{text(labels[i])}</title></text>")
        if not math.isfinite(value):
            continue
        start, end = sorted((x(0.0), x(value)))
        shown = _with_unit(number(factor * value), unit)
        at, anchor = (start - 6, "end") if value < 0 else (end + 6, "start")
        parts.append(f'<rect class="bar" x="{start}" y="{top + 1}" width="{end - start:g}" height="18" rx="2"/>')
        parts.append(f'<text x="{at:g}" y="{top + 15}" text-anchor="{anchor}">{text(shown)}</text>')
    parts.append(f'<line class="axis" x1="{x(0.0)}" x2="{x(0.0)}" y1="8" y2="{bottom}"/>')
    parts.append(f'<text x="{(x.start + x.end) / 2:g}" y="{bottom + 38}" text-anchor="middle">{text(x_label)}</text>')
    return _figure(title, "".join(parts), bottom + (46 if x_label else 26), f"{title}: bars for {len(v)} labels")


def histogram(
    values: ArrayLike,
    title: str,
    x_label: str,
    bins: int = 30,
    *,
    x_unit: str = "",
    vertical: Mapping[str, float] | None = None,
) -> str:
    """How many values fall where. bins: about how many, with round edges; values that are not finite are left out.

    vertical: named rules, such as a threshold.
    """
    v = _finite(values)
    v = v[np.isfinite(v)]
    if not len(v):
        return _empty(title)
    rules = {name: value for name, value in (vertical or {}).items() if math.isfinite(value)}
    low, high = _interval(float(v.min()), float(v.max()))
    step = float(np.diff(nice_ticks(low, high, bins)[:2])[0])
    first = math.floor(low / step + 1e-9)
    edges = (first + np.arange(max(math.ceil(high / step - 1e-9) - first, 1) + 1)) * step
    edges[0], edges[-1] = min(edges[0], low), max(edges[-1], high)
    counts, edges = np.histogram(v, edges)
    ends = min(edges[0], *rules.values(), math.inf), max(edges[-1], *rules.values(), -math.inf)
    y = _axis(0.0, float(counts.max()), 262, 34, "", snug=False)
    x = _axis(*ends, _left(y), WIDTH - 20, x_unit, snug=True)
    bars = "".join(
        f'<rect class="bar" x="{x(a) + 0.5:g}" y="{y(c):g}" width="{max(x(b) - x(a) - 1, 0.5):g}" '
        f'height="{y.start - y(c):g}"><title>{text(f"{number(a)} to {number(b)}: {c}")}</title></rect>'
        for a, b, c in zip(edges[:-1].tolist(), edges[1:].tolist(), counts.tolist(), strict=True)
        if c
    )
    lines = "".join(_rule(name, x(value), x(value), y.start, y.end) for name, value in rules.items())
    return _figure(title, _frame(x, y, x_label, "count") + bars + lines, 312, f"{title}: histogram of {len(v)} values")
