"""The tables of `bench_vllm.py`, for a terminal."""

import statistics
from collections.abc import Sequence

from rich.table import Table

from bench.reach.vllm_targets import Reached, Samples

__all__ = ["load_table", "table_of", "target_table"]


def table_of(title: str, samples: Samples, unit: str) -> Table:
    """Lay medians out for a terminal."""
    table = Table(title=title)
    for heading in ("what", f"median {unit}", "smallest", "largest", "runs"):
        table.add_column(heading, justify="left" if heading == "what" else "right")
    for name, values in samples.items():
        shown = [statistics.median(values), min(values), max(values)]
        table.add_row(name, *(f"{value:,.4g}" for value in shown), str(len(values)))
    return table


def load_table(title: str, found: dict[str, dict[str, float]]) -> Table:
    """Lay the figures of the load out for a terminal."""
    columns = list(dict.fromkeys(column for row in found.values() for column in row))
    table = Table(title=title)
    table.add_column("what")
    for column in columns:
        table.add_column(column, justify="right")
    for name, row in found.items():
        table.add_row(name, *(f"{row.get(column, 0):,.4g}" for column in columns))
    return table


def target_table(title: str, found: Sequence[Reached]) -> Table:
    """Lay targets and what was measured out for a terminal."""
    table = Table(title=title)
    for heading in ("what", "target", "measured", ""):
        table.add_column(heading)
    for one in found:
        row = (one.what, one.target, f"{one.measured:.3f}", "" if one.met else "missed")
        table.add_row(*row)
    return table
