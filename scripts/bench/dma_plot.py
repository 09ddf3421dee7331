"""Draws what `bench_dma` measured."""

from pathlib import Path
from typing import Any


def plot(path: Path, rows: list[dict[str, Any]]) -> None:
    """Draw the share of a large copy, one panel per layout.

    Over the page size with the largest chunks; over the number of runs with the smallest pages.
    """
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    layouts = sorted({row["layout"] for row in rows})
    figure, axes = plt.subplots(1, len(layouts), figsize=(5 * len(layouts), 4), squeeze=False)
    for axis, layout in zip(axes[0], layouts, strict=True):
        over, label = ("page_bytes", "bytes per page")
        drawn = [row for row in rows if row["layout"] == layout]
        if layout == "single":
            over, label = ("run_count", "runs of the smallest page")
            smallest = min(row["page_bytes"] for row in drawn)
            drawn = [row for row in drawn if row["page_bytes"] == smallest]
        for method in sorted({row["method"] for row in drawn}):
            for direction, style in (("offload", "-"), ("load", "--")):
                wanted = (method, direction)
                points = {
                    row[over]: row["share"]
                    for row in sorted(drawn, key=lambda row: row["chunk_bytes"])
                    if (row["method"], row["direction"]) == wanted
                }
                axis.plot(
                    *zip(*sorted(points.items()), strict=True),
                    style,
                    marker=".",
                    label=" ".join(wanted),
                )
        axis.set(xscale="log", title=layout, xlabel=label, ylabel="share of a large copy")
        axis.legend(fontsize="x-small")
    figure.tight_layout()
    figure.savefig(path)
