"""Runs a script in a process that is forked from one which has imported vLLM.

Importing it is most of the life of a tiny engine. What is forked shares the seed of `hash` with its
siblings, as processes of a real restart do not: the demo, the warm-up, the server, and scripts that
just end are started again, and their restarts hit.
"""

import multiprocessing
import os
import runpy
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from multiprocessing import forkserver
from pathlib import Path
from unittest.mock import patch

__all__ = ["run_preloaded"]

_IMPORTED = ["torch", "transformers", "vllm.config", "vllm.entrypoints.llm"]
_READ_BY_IMPORTS = ("HF_HUB_OFFLINE", "OMP_NUM_THREADS")
"""Settings that what is imported keeps from then on, for all that is forked."""


def run_preloaded(
    script: Path,
    arguments: Sequence[str],
    *,
    environment: Mapping[str, str],
    log: Path,
    timeout_seconds: float,
) -> int:
    """Run `script arguments...`; return its exit status, a negative one for a signal.

    Raises:
        TimeoutError: it did not end in time, and was killed.
    """
    context = _context(tuple((name, environment[name]) for name in _READ_BY_IMPORTS))
    process = context.Process(target=_run, args=(script, list(arguments), dict(environment), log))
    process.start()
    try:
        process.join(timeout_seconds)
        if process.exitcode is None:
            raise TimeoutError(f"{script.name} did not end in {timeout_seconds} seconds")
        return process.exitcode
    finally:
        process.kill()  # of one that has ended, nothing
        process.join()


@cache
def _context(settings: tuple[tuple[str, str], ...]) -> multiprocessing.context.ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_IMPORTED)
    with patch.dict(os.environ, settings):
        forkserver.ensure_running()
    return context


def _run(script: Path, arguments: list[str], environment: dict[str, str], log: Path) -> None:
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.environ.clear()
    os.environ.update(environment)
    sys.path[:0] = environment["PYTHONPATH"].split(os.pathsep)
    sys.argv = [str(script), *arguments]
    runpy.run_path(str(script), run_name="__main__")
