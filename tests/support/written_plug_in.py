"""Plug-ins that a test writes: a module, and the metadata as of an installed package."""

from collections.abc import Callable
from pathlib import Path

import pytest


def write_plug_in(folder: Path, group: str, name: str, source: str, *, attribute: str) -> str:
    """Install a module of its own, with one entry point, into `folder`; return its value."""
    module = f"{folder.name}_{name}_{len(list(folder.iterdir()))}".replace("-", "_")
    (folder / f"{module}.py").write_text(source)
    metadata = folder / f"{module}-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(f"[{group}]\n{name} = {module}:{attribute}\n")
    return f"{module}:{attribute}"


def installer(folder: Path, monkeypatch: pytest.MonkeyPatch, group: str) -> Callable[[str], str]:
    """Return what installs the function `make` of a source, and answers the plug-in's name."""
    folder.mkdir(exist_ok=True)
    monkeypatch.syspath_prepend(folder)
    name = f"{group.rpartition('.')[2]}_{folder.parent.name}"

    def install(source: str) -> str:
        write_plug_in(folder, group, name, source, attribute="make")
        return name

    return install
