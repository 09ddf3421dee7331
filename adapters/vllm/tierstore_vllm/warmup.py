"""Prefill prompts through vLLM's offline engine, so that later engines find them on disk.

The engine is an ordinary one with the connector, and offloads the same chunks as a server. Between
batches the warm-up waits until everything is written, so that no chunk is dropped although the
engine computes faster than the disk writes.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from vllm import LLM, EngineArgs, SamplingParams
from vllm.config import KVTransferConfig
from vllm.tokenizers import TokenizerLike

from tierstore.config import StoreConfig, to_mapping
from tierstore.errors import PromptError
from tierstore.metrics import Metric
from tierstore.tier.admission import make_admission
from tierstore.warmup import ChatPrompt, Prompt, TextPrompt, distinct_prefixes

__all__ = ["WarmupReport", "warm_up"]

_COUNTER_PREFIX = "vllm:tierstore_"
_STALL_SECONDS = 10.0
"""The warm-up stops waiting for writes when nothing was written for this long."""

_FIRST_BATCH_TOKENS = 4096
"""Bound of the first batch, which shows how many bytes a token takes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmupReport:
    """What a warm-up did."""

    prompt_count: int
    prefill_count: int
    """Prompts that are not a prefix of another one."""
    token_count: int
    """Tokens of the prompts that were prefilled."""
    computed_token_count: int
    counters: dict[str, int]
    """tierstore's own sums at the end, by `name` or `name{label}`."""

    def total(self, metric: Metric) -> int:
        """Add up a metric over its labels."""
        return _total(self.counters, metric)

    @property
    def lost_chunk_count(self) -> int:
        """Chunks that were computed, but are missing on a tier that should have them."""
        return self.total(Metric.DROPPED_DEMOTES) + self.total(Metric.REFUSED_OFFLOADS)


def warm_up(
    prompts: Sequence[tuple[int, Prompt]],
    config: StoreConfig,
    engine_args: EngineArgs,
    report_progress: Callable[[int, int], None],
) -> WarmupReport:
    """Prefill every distinct prefix once, and wait until it is stored.

    `config` comes from `patient_config`. `report_progress` is called with (prefills done, total),
    first with 0 done.

    Raises:
        PromptError: a prompt does not fit the model; names its line.
    """
    engine_args.kv_transfer_config = KVTransferConfig(
        kv_connector="TierStoreConnector",
        kv_connector_module_path="tierstore_vllm",
        kv_role="kv_both",
        kv_load_failure_policy="recompute",
        kv_connector_extra_config={"tierstore.config": to_mapping(config)},
    )
    engine_args.disable_log_stats = False
    llm = LLM.from_engine_args(engine_args)
    try:
        return _Warmup(llm, config).run(_token_lists(llm, prompts), report_progress)
    finally:
        llm.llm_engine.engine_core.shutdown(timeout=60.0)


class _Warmup:
    """A running engine, and its counts so far."""

    def __init__(self, llm: LLM, config: StoreConfig) -> None:
        self._llm = llm
        self._config = config
        self._computed_token_count = 0
        self._token_count = 0

    def run(
        self, prompts: list[list[int]], report_progress: Callable[[int, int], None]
    ) -> WarmupReport:
        chosen = [prompts[index] for index in self._needed(prompts)]
        report_progress(0, len(chosen))
        done_count = 0
        while done_count < len(chosen):
            batch = list(_take(chosen[done_count:], self._batch_token_count()))
            self._prefill(batch)
            self._settle()
            done_count += len(batch)
            report_progress(done_count, len(chosen))
        return WarmupReport(
            prompt_count=len(prompts),
            prefill_count=len(chosen),
            token_count=self._token_count,
            computed_token_count=self._computed_token_count,
            counters=self._counters(),
        )

    def _needed(self, prompts: list[list[int]]) -> list[int]:
        if self._llm.llm_engine.vllm_config.model_config.is_hybrid:
            # The state of linear attention is kept at the end of a prefill only. A prompt that is a
            # prefix of another one is therefore a hit only if it was prefilled itself.
            return sorted({tuple(prompt): index for index, prompt in enumerate(prompts)}.values())
        return distinct_prefixes(prompts)

    def _batch_token_count(self) -> int:
        """Bound a batch to a quarter of the memory in which its chunks wait to be written."""
        offloaded_bytes = _total(self._counters(), Metric.OFFLOADED_BYTES)
        if not offloaded_bytes:
            return _FIRST_BATCH_TOKENS
        bytes_per_token = offloaded_bytes / self._computed_token_count
        return int(self._config.primary.capacity_bytes / 4 / bytes_per_token)

    def _prefill(self, batch: list[list[int]]) -> None:
        sampling = SamplingParams(max_tokens=1, temperature=0.0)
        outputs = self._llm.generate(
            [{"prompt_token_ids": prompt} for prompt in batch], sampling, use_tqdm=False
        )
        for output in outputs:
            length = len(output.prompt_token_ids or ())
            self._token_count += length
            self._computed_token_count += length - (output.num_cached_tokens or 0)

    def _settle(self) -> None:
        """Wait until every offloaded chunk is written, or writes make no progress.

        vLLM reports a connector's statistics with the outputs of a step, so a tiny request is sent
        repeatedly. It has less than one block and is never stored.
        """
        tiers = [
            tier.name
            for tier in self._config.secondary
            if make_admission(tier.cascade).admits_arrivals
        ]
        seen, moved_at = self._counters(), time.monotonic()
        while time.monotonic() - moved_at < _STALL_SECONDS:
            lost = _total(seen, Metric.DROPPED_DEMOTES)
            wanted = _total(seen, Metric.OFFLOADED_CHUNKS)
            name = Metric.DEMOTED_CHUNKS.metric_name
            if all(seen.get(f"{name}{{{tier}}}", 0) + lost >= wanted for tier in tiers):
                return
            ask = SamplingParams(max_tokens=1, temperature=0.0)
            self._llm.generate({"prompt_token_ids": [1]}, ask, use_tqdm=False)
            now = self._counters()
            if now != seen:
                seen, moved_at = now, time.monotonic()

    def _counters(self) -> dict[str, int]:
        sums: dict[str, int] = {}
        names = {metric.metric_name.removesuffix("_total"): metric for metric in Metric}
        for sample in self._llm.get_metrics():
            metric = names.get(sample.name.removeprefix(_COUNTER_PREFIX).removesuffix("_total"))
            if metric is not None and sample.name.startswith(_COUNTER_PREFIX):
                label = f"{{{sample.labels[metric.label]}}}" if metric.label else ""
                key = metric.metric_name + label
                sums[key] = sums.get(key, 0) + int(sample.value)
        return sums


def _take(prompts: Iterable[list[int]], token_count_max: int) -> Iterable[list[int]]:
    """Yield leading prompts up to a number of tokens, but at least one."""
    token_count = 0
    for number, prompt in enumerate(prompts):
        token_count += len(prompt)
        if number and token_count > token_count_max:
            return
        yield prompt


def _token_lists(llm: LLM, prompts: Sequence[tuple[int, Prompt]]) -> list[list[int]]:
    """Tokenise as vLLM's server does, and refuse prompts that do not fit the model."""
    tokenizer = llm.get_tokenizer()
    model_config = llm.llm_engine.vllm_config.model_config
    length_max, vocabulary = model_config.max_model_len - 1, model_config.get_vocab_size()
    token_lists = []
    for line, prompt in prompts:
        tokens = _tokenise(tokenizer, prompt)
        if not 0 < len(tokens) <= length_max:
            raise PromptError(
                f"line {line}: {len(tokens)} tokens, but the engine takes 1 to {length_max}; "
                "see --max-model-len"
            )
        if max(tokens) >= vocabulary:
            raise PromptError(
                f"line {line}: token id {max(tokens)} is not below the vocabulary's {vocabulary}"
            )
        token_lists.append(tokens)
    return token_lists


def _tokenise(tokenizer: TokenizerLike, prompt: Prompt) -> list[int]:
    if isinstance(prompt, TextPrompt):
        return list(tokenizer.encode(prompt.text))
    if isinstance(prompt, ChatPrompt):
        messages = [{"role": role, "content": content} for role, content in prompt.messages]
        rendered = tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True
        )
        return list(tokenizer.encode(rendered, add_special_tokens=False))
    return list(prompt.token_ids)


def _total(counters: dict[str, int], metric: Metric) -> int:
    name = metric.metric_name
    return sum(amount for key, amount in counters.items() if key.partition("{")[0] == name)
