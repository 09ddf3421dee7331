"""Runs a script in a process that is forked from one which has imported vLLM.

Importing it is most of the life of a tiny engine. What is forked shares the seed of `hash` with its
siblings, as processes of a real restart do not: the demo, the warm-up, the server, and engines that
end in unusual ways are started anew, and their restarts hit.
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


def run_preloaded(
    script: Path,
    arguments: Sequence[str],
    *,
    environment: Mapping[str, str],
    log: Path,
    timeout_seconds: float,
    folder: Path | None = None,
) -> int:
    """Run `script arguments...` in `folder`; return its exit status, a negative one for a signal.

    Raises:
        TimeoutError: it did not end in time, and was killed.
    """
    context = _context(environment["OMP_NUM_THREADS"])
    process = context.Process(
        target=_run, args=(script, list(arguments), dict(environment), log, folder)
    )
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
def _context(thread_count: str) -> multiprocessing.context.ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_IMPORTED)
    # The OpenMP library reads it when it is loaded, and the server keeps it for all it forks.
    with patch.dict(os.environ, OMP_NUM_THREADS=thread_count):
        forkserver.ensure_running()
    return context


def _run(
    script: Path,
    arguments: list[str],
    environment: dict[str, str],
    log: Path,
    folder: Path | None,
) -> None:
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.environ.clear()
    os.environ.update(environment)
    sys.path[:0] = environment["PYTHONPATH"].split(os.pathsep)
    sys.argv = [str(script), *arguments]
    if folder is not None:
        os.chdir(folder)
    runpy.run_path(str(script), run_name="__main__")
