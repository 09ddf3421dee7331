"""The tables of docs/format.md, parsed."""

import re
from itertools import pairwise

from python_paths import ROOT

FORMAT = (ROOT / "docs" / "format.md").read_text()
INTEGRITY = (ROOT / "docs" / "integrity.md").read_text()


def section_of(heading, text=FORMAT):
    """Return what stands below a heading, up to the next one."""
    (section,) = re.findall(
        rf"^#+ {re.escape(heading)}\n(.*?)(?=^#+ |\Z)", text, re.MULTILINE | re.DOTALL
    )
    return section


def table_of(heading, text=FORMAT):
    """Return the one table below a heading: its rows by column."""
    lines = re.findall(r"^\|.*$", section_of(heading, text), re.MULTILINE)
    names, _, *rows = ([cell.strip() for cell in line.split("|")[1:-1]] for line in lines)
    return [dict(zip(names, row, strict=True)) for row in rows]


def fields_of(heading, text=FORMAT):
    """Return name, offset and width of each field of a byte table, which has no gaps."""
    fields = [
        (row["field"].replace(" ", "_"), int(row["offset"]), int(row["bytes"]))
        for row in table_of(heading, text)
    ]
    for (_, offset, width), (name, following, _) in pairwise(fields):
        assert following == offset + width, f"{name} does not begin where the field before it ends"
    return fields


def end_of(fields):
    """Return where a byte table ends."""
    _, offset, width = fields[-1]
    return offset + width


def content_of(heading, field, text=FORMAT):
    """Return what a byte table says of a field."""
    (content,) = (row["content"] for row in table_of(heading, text) if row["field"] == field)
    return content
