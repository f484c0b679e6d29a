"""What `lockrouter demo` shows: the shards while the load runs, and the summary."""

from __future__ import annotations

import time
from collections import deque
from typing import NamedTuple

from rich.console import Group
from rich.table import Table
from rich.text import Text

from lockrouter.testing.exclusion import Verdict
from lockrouter.testing.fleet import Fleet
from lockrouter.testing.load import Figures, Report

__all__ = ["Row", "View", "summary"]

_WINDOW = 1.0
_EVENTS = 6
_COLUMNS = ("shard", "server", "breaker", "locks/s", "degraded/s", "refused/s", "pool busy+idle", "p50 ms", "p99 ms")


class Row(NamedTuple):
    """One shard in the last second, all processes together; times in seconds."""

    shard: str
    server: str
    breaker: str
    locks: float
    degraded: float
    refused: float
    busy: int
    idle: int
    p50: float
    p99: float


class View:
    """Follows a fleet: rates over the last second, and the events of the run with their times."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._began = time.monotonic()
        self._past = deque([(self._began, fleet.figures())])
        self.servers = dict.fromkeys(self._past[0][1], "running")
        self.events: list[str] = []

    @property
    def elapsed(self) -> float:
        """Seconds since the load began."""
        return time.monotonic() - self._began

    def event(self, text: str) -> str:
        """Note, with its time, that something happened; returns the line."""
        line = f"{self.elapsed:5.1f} s  {text}"
        self.events.append(line)
        return line

    def rows(self) -> list[Row]:
        """Every shard now."""
        now, figures, reports = time.monotonic(), self._fleet.figures(), self._fleet.reports()
        self._past.append((now, figures))
        while len(self._past) > 2 and now - self._past[1][0] > _WINDOW:
            self._past.popleft()
        before_at, before = self._past[0]
        seconds = max(0.001, now - before_at)
        return [self._row(name, figures[name], before[name], seconds, reports) for name in figures]

    def _row(self, name: str, figures: Figures, before: Figures, seconds: float, reports: list[Report]) -> Row:
        shards = [report.shards[name] for report in reports]
        shut = [shard.breaker for shard in shards if shard.breaker != "closed"]
        waits = figures.waits.since(before.waits)
        return Row(
            shard=name,
            server=self.servers[name],
            breaker=f"{max(shut)} in {len(shut)} of {len(shards)}" if shut else "closed",
            locks=(figures.granted - before.granted) / seconds,
            degraded=(figures.degraded - before.degraded) / seconds,
            refused=(figures.refused - before.refused) / seconds,
            busy=sum(shard.busy for shard in shards),
            idle=sum(shard.idle for shard in shards),
            p50=waits.percentile(50),
            p99=waits.percentile(99),
        )

    def render(self) -> Group:
        """The live screen."""
        rows = self.rows()
        table = Table(title=f"{sum(row.locks for row in rows):,.0f} locks/s after {self.elapsed:.0f} s")
        for column in _COLUMNS:
            table.add_column(column, justify="left" if column in _COLUMNS[:3] else "right")
        for row in rows:
            table.add_row(
                row.shard,
                row.server if row.server == "running" else f"[red]{row.server}[/]",
                row.breaker if row.breaker == "closed" else f"[red]{row.breaker}[/]",
                f"{row.locks:,.0f}",
                f"[yellow]{row.degraded:,.0f}[/]" if row.degraded else "0",
                f"[yellow]{row.refused:,.0f}[/]" if row.refused else "0",
                f"{row.busy}+{row.idle}",
                f"{row.p50 * 1e3:.1f}",
                f"{row.p99 * 1e3:.1f}",
            )
        return Group(table, *(Text(line) for line in self.events[-_EVENTS:]))

    def line(self) -> str:
        """The same in one line, for what is no terminal."""
        rows = self.rows()
        odd = [f"{row.shard} breaker {row.breaker}" for row in rows if row.breaker != "closed"]
        rates = (
            f"{sum(row.locks for row in rows):6,.0f} locks/s  degraded {sum(row.degraded for row in rows):5,.0f}/s  "
            f"refused {sum(row.refused for row in rows):4,.0f}/s  p50 {max(row.p50 for row in rows) * 1e3:5.1f} ms  "
            f"p99 {max(row.p99 for row in rows) * 1e3:6.1f} ms"
        )
        return "  ".join([f"{self.elapsed:5.1f} s ", rates, *odd])


def summary(figures: Figures, seconds: float, verdict: Verdict) -> Table:
    """What the whole run came to."""
    ratio = figures.granted / figures.calls if figures.calls else 0.0
    table = Table(show_header=False, title="Summary", title_justify="left")
    for name, value in (
        ("locks per second", f"{figures.granted / seconds:,.0f} ({figures.granted:,} in {seconds:.1f} s)"),
        ("wait p50 / p99 / max", " / ".join(f"{one * 1e3:.1f} ms" for one in _three(figures))),
        ("success ratio", f"{ratio:.2%} of {figures.calls:,} calls"),
        ("degraded locks", f"{figures.degraded:,}, {figures.undegraded:,} of the outage not marked so"),
        ("refused", f"{figures.refused:,} (the keys whose class says on_outage = refuse)"),
        ("busy / lost / errors", f"{figures.busy:,} / {figures.lost:,} / {figures.errors:,}"),
        ("shared counters", f"expected {verdict.expected:,}, found {verdict.found:,}"),
        ("tokens", f"{verdict.falls:,} did not rise" if verdict.falls else "rose strictly, for every key"),
        ("exclusion", "[bold green]held[/]" if verdict.kept else f"[bold red]FAILED[/]: {verdict}"),
    ):
        table.add_row(name, value)
    return table


def _three(figures: Figures) -> tuple[float, float, float]:
    waits = figures.waits
    return waits.percentile(50), waits.percentile(99), waits.longest
