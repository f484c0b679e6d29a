"""The result of one run on one server: as a table in the terminal, as JSON, and as Markdown."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench_figures import Figures
from bench_plot import MISSING, draw
from bench_targets import Target, targets
from rich.console import Console
from rich.table import Table

from lockrouter.cli.timing import Contender, ratio

__all__ = ["Report", "markdown"]

_SPREAD = "lowest – highest"
_COLUMNS = (
    "lock and release",
    "callers",
    "locks/s",
    _SPREAD,
    "p50 ms",
    "p99 ms",
    "lockrouter is",
)


@dataclass(slots=True)
class Report:
    """All that was found on one server."""

    vendor: str
    date: str
    servers: Mapping[str, str]
    machine: Mapping[str, str]
    rounds: int
    seconds: float
    contenders: Sequence[Contender]
    curve: Sequence[Contender]
    """The same ways to lock with other numbers of callers, for the picture."""
    figures: Figures | None
    left_out: list[str] = field(default_factory=list)
    pictures: Sequence[Path] = ()
    """Those that `save` could draw."""

    @property
    def title(self) -> str:
        """Server and date."""
        return f"{self.servers[self.vendor]}, {self.date}"

    @property
    def targets(self) -> list[Target]:
        """Each target with what was seen."""
        return targets(self.contenders, self.curve, self.figures)

    def rows(self) -> list[tuple[str, ...]]:
        """The table of contenders: by kind of work and callers, the fastest first."""
        order = sorted(self.contenders, key=lambda one: (one.callers, -one.rate))
        return [self._row(one) for one in order]

    def _row(self, one: Contender) -> tuple[str, ...]:
        rates = [sample.rate for sample in one.samples]
        mine = next((c for c in self.contenders if (c.name, c.callers) == ("lockrouter", one.callers)), None)
        compared = f"{ratio(mine, one):.2f} ×" if mine is not None and mine is not one else ""
        span = f"{min(rates):,.0f} – {max(rates):,.0f}"
        return (
            one.name,
            str(one.callers),
            f"{one.rate:,.0f}",
            span,
            _ms(one.latency.get(50.0)),
            _ms(one.latency.get(99.0)),
            compared,
        )

    def print(self, console: Console) -> None:
        """Show both tables."""
        table = Table(title=self.title)
        for number, name in enumerate(_COLUMNS):
            if name != _SPREAD:  # eighty columns have no place for it
                table.add_column(name, justify="right" if number else "left")
        for row in self.rows():
            cells = (cell for cell, name in zip(row, _COLUMNS, strict=True) if name != _SPREAD)
            table.add_row(*cells, style="bold" if row[0] == "lockrouter" else "")
        console.print(table)
        table = Table("target", "wanted", "seen")
        for target in self.targets:
            style = {None: "dim", True: "green", False: "yellow"}[target.met]
            table.add_row(target.work, target.shown_wanted, target.shown_seen, style=style)
        console.print(table)
        for line in self.left_out:
            console.print(line)

    def save(self, folder: Path) -> list[Path]:
        """Write `<date>-<vendor>.json` and `.md`, and the pictures where they can be drawn; returns where."""
        folder.mkdir(parents=True, exist_ok=True)
        stem = folder / f"{self.date}-{self.vendor}"
        data, text = stem.with_name(f"{stem.name}.json"), stem.with_name(f"{stem.name}.md")
        if self.curve:
            self.pictures = draw(stem, self.title, [*self.curve, *self._on_curve()], self.contenders)
            self.left_out += [] if self.pictures else [MISSING]
        data.write_text(json.dumps(self.as_json(), indent=1, ensure_ascii=False) + "\n", "utf-8")
        text.write_text("# lockrouter: a run of the benchmark\n\n" + markdown([self], ""), "utf-8")
        return [data, text, *self.pictures]

    def _on_curve(self) -> list[Contender]:
        """Those of the table whose way to lock is on the curve too."""
        names = {one.name for one in self.curve}
        return [one for one in self.contenders if one.name in names]

    def as_json(self) -> dict[str, Any]:
        """All that was measured; seconds, locks per second, and the units the names say."""
        return {
            "vendor": self.vendor,
            "date": self.date,
            "servers": dict(self.servers),
            "machine": dict(self.machine),
            "rounds": self.rounds,
            "seconds": self.seconds,
            "contenders": [_contender(one) for one in self.contenders],
            "curve": [_contender(one) for one in self.curve],
            "figures": self.figures,
            "targets": [
                {"work": t.work, "wanted": t.wanted, "at_most": t.at_most, "seen": t.seen, "unit": t.unit}
                for t in self.targets
            ],
            "left_out": list(self.left_out),
        }


def _contender(one: Contender) -> dict[str, Any]:
    return {
        "name": one.name,
        "callers": one.callers,
        "locks_per_second": round(one.rate, 1),
        "runs": [round(sample.rate, 1) for sample in one.samples],
        "latency": {f"p{percent:g}": round(seconds, 7) for percent, seconds in one.latency.items()},
    }


def _ms(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds * 1000:.2f}"


def markdown(reports: Sequence[Report], folder: str) -> str:
    """The runs as Markdown: the machine once, then tables and pictures for each server, these in `folder`."""
    first = reports[0]
    programs = ", ".join(dict.fromkeys(text for report in reports for text in report.servers.values()))
    facts = {**first.machine, "servers": programs}
    lines = ["; ".join(f"{name}: {text}" for name, text in facts.items()) + ".", ""]
    lines += [
        f"Servers, client and load share the machine. Medians of {first.rounds} rounds of {first.seconds:g} s in turns."
    ]
    for report in reports:
        lines += ["", f"### {report.title}", "", *_table(_COLUMNS, report.rows(), right=range(1, 7)), ""]
        shown = [(t.work, t.shown_wanted, t.shown_seen) for t in report.targets]
        lines += _table(("target", "wanted", "seen"), shown, right=(1, 2))
        lines += ["", *(f"- {line}" for line in report.left_out)] if report.left_out else []
        for path in report.pictures:
            lines += ["", f"![{path.stem.rpartition('-')[2]} on {report.title}]({folder}{path.name})"]
    return "\n".join(lines).rstrip() + "\n"


def _table(header: Sequence[str], rows: Sequence[Sequence[str]], *, right: Sequence[int]) -> list[str]:
    rule = ["---:" if number in right else "---" for number in range(len(header))]
    return ["| " + " | ".join(cells) + " |" for cells in (header, rule, *rows)]
