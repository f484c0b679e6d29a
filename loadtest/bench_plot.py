"""Pictures of a run: throughput against callers, and the distribution of latency. They need matplotlib."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lockrouter.cli.timing import Contender

__all__ = ["MISSING", "draw"]

MISSING = "no pictures: matplotlib is not installed: pip install 'lockrouter[plot]'"
_OWN = "lockrouter"
_STYLES = ("-", "--", "-.", ":")
_SETTINGS = {
    "svg.fonttype": "none",
    "svg.hashsalt": "lockrouter",
    "font.size": 10,
    "axes.grid": True,
    "grid.alpha": 0.3,
}
_CALLERS_SHOWN = 8
_PERCENTS = (1, 10, 50, 90, 99, 99.9)


def draw(stem: Path, title: str, curve: Sequence[Contender], table: Sequence[Contender]) -> list[Path]:
    """Write `<stem>-throughput.svg` and `<stem>-latency.svg`; returns those that were written.

    None is without matplotlib, nor where there is nothing to draw.
    """
    if importlib.util.find_spec("matplotlib") is None or not curve:
        return []
    matplotlib: Any = importlib.import_module("matplotlib")
    matplotlib.use("svg")
    with matplotlib.rc_context(_SETTINGS):
        return [
            _save(_throughput(title, curve), stem.with_name(f"{stem.name}-throughput.svg")),
            _save(_latency(title, table), stem.with_name(f"{stem.name}-latency.svg")),
        ]


def _axes(title: str) -> tuple[Any, Any]:
    figure: Any = importlib.import_module("matplotlib.figure").Figure(figsize=(9, 5.2), layout="constrained")
    axes = figure.subplots()
    axes.set_title(title)
    return figure, axes


def _save(figure: Any, path: Path) -> Path:
    """The same run gives the same bytes."""
    figure.savefig(path, metadata={"Date": None})
    text = path.read_text("utf-8")
    path.write_text("".join(f"{line.rstrip()}\n" for line in text.splitlines()), "utf-8")
    return path


def _style(number: int, name: str) -> dict[str, Any]:
    own = name == _OWN
    style = "-" if own else _STYLES[number % len(_STYLES)]
    return {"color": f"C{number}", "linestyle": style, "linewidth": 2.6 if own else 1.3, "label": name}


def _throughput(title: str, curve: Sequence[Contender]) -> Any:
    """A line for each way to lock, both axes by powers."""
    figure, axes = _axes(f"Lock and release, distinct keys: {title}")
    lines: dict[str, list[Contender]] = {}
    for one in curve:
        lines.setdefault(one.name, []).append(one)
    for number, (name, points) in enumerate(lines.items()):
        points.sort(key=lambda one: one.callers)
        callers, rates = [one.callers for one in points], [one.rate for one in points]
        axes.plot(callers, rates, marker="o", markersize=4, **_style(number, name))
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    ticks = sorted({one.callers for one in curve})
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.set(xlabel="callers in one process", ylabel="locks per second")
    figure.legend(loc="outside right upper", fontsize=9)
    return figure


def _latency(title: str, table: Sequence[Contender]) -> Any:
    """How long a cycle took at most, for so many percent of them; the tail is given as much room as the rest."""
    figure, axes = _axes(f"Lock and release, {_CALLERS_SHOWN} callers, distinct keys: {title}")
    shown: Mapping[str, Contender] = {one.name: one for one in table if one.callers == _CALLERS_SHOWN and one.latency}
    for number, (name, one) in enumerate(shown.items()):
        shares = [percent / 100 for percent in one.latency]
        spans = [seconds * 1000 for seconds in one.latency.values()]
        axes.plot(shares, spans, marker="o", markersize=4, **_style(number, name))
    axes.set_xscale("logit")
    axes.set_xlim(0.008, 0.9993)
    axes.set_xticks([percent / 100 for percent in _PERCENTS], [f"{percent:g}" for percent in _PERCENTS])
    axes.set_xticks([], minor=True)
    axes.set_yscale("log")
    axes.set(xlabel="percent of the cycles", ylabel="took at most so many ms")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    figure.legend(loc="outside right upper", fontsize=9)
    return figure
