"""Check the dependencies of tierstore's core and extras for known vulnerabilities.

    .venv/bin/python scripts/audit.py

Audits the installed versions of the dependencies in `pyproject.toml`, transitive ones included. An
engine and its dependencies are not audited. Ends with 1 if a vulnerability is known. Without a
network, or if the service knows none of the packages, it prints a line that begins with `audit:
skipped` and ends with 0: checks must work offline, and a skipped audit must be visible.
"""

import json
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).resolve().parent.parent
SKIPPED_EXTRAS = ("dev", "testing")
"""Extras that only developers install."""

LIMIT_SECONDS = 180
SOCKET_SECONDS = 15
NETWORK_WORDS = (
    "ConnectionError",
    "ConnectTimeout",
    "HTTPError",
    "Max retries exceeded",
    "NameResolutionError",
    "ProxyError",
    "ReadTimeout",
    "SSLError",
    "timed out",
)
TAIL_CHARS = 2_000


@dataclass(frozen=True, slots=True)
class Verdict:
    """The printed text, and the exit status."""

    lines: tuple[str, ...]
    status: int


def main() -> int:
    """Audit, print the verdict, and return the exit status."""
    with (ROOT / "pyproject.toml").open("rb") as file:
        pinned = dict(installed(declared(tomllib.load(file)["project"])))
    verdict = audit([f"{name}=={version}" for name, version in sorted(pinned.items())])
    print("\n".join(verdict.lines))
    return verdict.status


def declared(project: Mapping[str, object]) -> list[Requirement]:
    """Return the dependencies that a project declares for its users."""
    core, extras = project["dependencies"], project["optional-dependencies"]
    assert isinstance(core, list)
    assert isinstance(extras, dict)
    lists = [core, *(extra for name, extra in extras.items() if name not in SKIPPED_EXTRAS)]
    return [Requirement(text) for texts in lists for text in texts]


def installed(wanted: Sequence[Requirement]) -> Iterator[tuple[str, str]]:
    """Yield name and version of the installed packages in `wanted`, and of their dependencies."""
    waiting, seen = list(wanted), set()
    while waiting:
        requirement = waiting.pop()
        name = canonicalize_name(requirement.name)
        key = (name, frozenset(requirement.extras))
        if key in seen:
            continue
        seen.add(key)
        try:
            found = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            continue  # of an extra that this environment was made without
        # Builds of an index of their own, such as 2.13.0+cpu, are known by their public version.
        yield name, Version(found.version).public
        extras = {"", *requirement.extras}
        for text in found.requires or ():
            needed = Requirement(text)
            marker = needed.marker
            if marker is None or any(marker.evaluate({"extra": extra}) for extra in extras):
                waiting.append(needed)


def audit(pinned: Sequence[str]) -> Verdict:
    """Ask pip-audit about versions."""
    with tempfile.TemporaryDirectory() as folder:
        requirements = Path(folder) / "requirements.txt"
        requirements.write_text("\n".join(pinned) + "\n")
        command = [
            *(sys.executable, "-m", "pip_audit", "--requirement", str(requirements)),
            *("--no-deps", "--disable-pip", "--format", "json", "--progress-spinner", "off"),
            *("--timeout", str(SOCKET_SECONDS)),
        ]
        try:
            done = subprocess.run(command, text=True, capture_output=True, timeout=LIMIT_SECONDS)
        except subprocess.TimeoutExpired:
            return skipped(f"no answer in {LIMIT_SECONDS} s")
    return verdict_of(done.stdout, done.stderr)


def verdict_of(output: str, errors: str) -> Verdict:
    """Parse the output of pip-audit: its report, or the reason why there is none."""
    try:
        packages = json.loads(output)["dependencies"]
    except (ValueError, KeyError):
        return _without_report(errors)
    known = [package for package in packages if "skip_reason" not in package]
    unknown = [str(package["name"]) for package in packages if "skip_reason" in package]
    vulnerable = [
        f"audit: {package['name']} {package['version']}: {found['id']}, fixed in "
        f"{', '.join(found['fix_versions']) or 'no version yet'}"
        for package in known
        for found in package["vulns"]
    ]
    if not known:
        return skipped(f"the service knows none of {len(unknown)} packages")
    lines = [f"audit: {len(known)} packages, {len(vulnerable)} known vulnerabilities", *vulnerable]
    if unknown:
        lines.append(f"audit: skipped {', '.join(unknown)}: not known to the service")
    return Verdict(tuple(lines), 1 if vulnerable else 0)


def _without_report(errors: str) -> Verdict:
    if "No module named pip_audit" in errors:
        return skipped("pip-audit is not installed: pip install 'tierstore[dev]'")
    words = [word for word in NETWORK_WORDS if word in errors]
    if words:
        return skipped(f"no network, or no service ({', '.join(words)})")
    return Verdict((f"audit: failed: {errors[-TAIL_CHARS:]}",), 1)


def skipped(why: str) -> Verdict:
    """Return the verdict of an audit that did not happen."""
    return Verdict((f"audit: skipped, nothing was audited: {why}",), 0)


if __name__ == "__main__":
    sys.exit(main())
