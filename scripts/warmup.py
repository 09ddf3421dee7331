"""Fill tierstore with the KV cache of prompts before a server needs them.

    python scripts/warmup.py --prompts FILE --config FILE --model NAME [vLLM's engine options]

The file of prompts has JSON lines, each with one of `text`, `messages` (role and content) or
`token_ids`. Options that are part of the cache's identity (--dtype, --block-size, --kv-cache-dtype,
--tensor-parallel-size, ...) must be those of the server. Ends with status 1 if a prompt is invalid
or a computed chunk could not be stored.
"""

import argparse
import asyncio
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from tierstore.config import load_config
from tierstore.errors import MissingExtraError, TierStoreError
from tierstore.metrics import Metric
from tierstore.warmup import Prompt, patient_config, read_prompts

if TYPE_CHECKING:
    from tierstore_vllm.warmup import WarmupReport


def main() -> int:
    """Run the warm-up; return the exit status."""
    try:
        return run()
    except TierStoreError as error:
        print(f"warmup: {error}", file=sys.stderr)
        return 1


def run() -> int:
    """Read, prefill, report. Errors in the files are reported before vLLM is imported."""
    own = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter, allow_abbrev=False
    )
    own.add_argument("--prompts", type=Path, required=True, help="JSON lines")
    own.add_argument("--config", type=Path, required=True, help="tierstore's YAML file")
    own.add_argument("--model", required=True, help="the model, named as for the server")
    options, engine_options = own.parse_known_args()
    config = patient_config(load_config(options.config))
    prompts = asyncio.run(collect(options.prompts))
    try:
        from tqdm import tqdm
        from vllm import EngineArgs
        from vllm.utils.argparse_utils import FlexibleArgumentParser
    except ImportError as error:
        raise MissingExtraError(
            f"{error.name} is missing: run a warm-up in vLLM's environment, "
            "with tierstore installed as 'tierstore[warmup]'"
        ) from error
    from tierstore_vllm.warmup import warm_up

    parser = EngineArgs.add_cli_args(FlexibleArgumentParser(prog=own.prog))
    engine_args = EngineArgs.from_cli_args(
        parser.parse_args(["--model", options.model, *engine_options])
    )
    with tqdm(desc="prefill", unit="prompt", disable=None) as bar:

        def show(done: int, count: int) -> None:
            bar.total = count
            bar.update(done - bar.n)

        report = warm_up(prompts, config, engine_args, show)
    print_report(report)
    return 1 if report.lost_chunk_count else 0


async def collect(path: Path) -> list[tuple[int, Prompt]]:
    """Read all prompts with their line numbers."""
    return [numbered async for numbered in read_prompts(path)]


def print_report(report: "WarmupReport") -> None:
    """Print the counts of the warm-up."""
    counters = report.counters
    print(f"prompts             {report.prompt_count:,}")
    print(f"  prefilled         {report.prefill_count:,} (the others are prefixes of these)")
    print(f"tokens              {report.token_count:,}")
    print(f"  computed          {report.computed_token_count:,}")
    for name, amount in sorted(counters.items()):
        metric_name, _, label = name.rstrip("}").partition("{")
        if metric_name == Metric.DEMOTED_CHUNKS.metric_name:
            size_bytes = counters.get(f"{Metric.DEMOTED_BYTES.metric_name}{{{label}}}", 0)
            print(f"stored in {label:<10}{amount:,} chunks, {size_bytes:,} bytes")
    hits = report.total(Metric.HIT_CHUNKS)
    print(f"already there       {hits:,} chunks")
    if report.lost_chunk_count:
        print(f"NOT stored          {report.lost_chunk_count:,} chunks: see the log")


if __name__ == "__main__":
    sys.exit(main())
