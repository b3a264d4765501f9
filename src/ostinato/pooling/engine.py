"""The engine of models that read a text once: texts in; embeddings, scores or classes out.

It has no KV cache and no scheduler: sequences are sorted by length and packed into batches, as many
as the limits of a step allow, and each batch is pooled to one state per sequence as soon as it ran.
Causal models go the same way as encoders.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from typing import Any, Literal, NoReturn

import torch
import torch.nn.functional as F

from ostinato.config import EngineConfig
from ostinato.engine.start import starting
from ostinato.engine.thread_use import ThreadUse
from ostinato.errors import ClosedError, ConfigError, RequestError
from ostinato.graphs.capture.closing import Owner
from ostinato.graphs.policy.modes import (
    AttentionCGSupport,
    CUDAGraphMode,
    ResolvedMode,
    resolve_mode,
)
from ostinato.graphs.policy.plan import CapturePlan
from ostinato.loading.encoders.encoder import load_encoder
from ostinato.models.pooling import POOLINGS, Pooling, pool
from ostinato.outputs import ClassificationOutput, EmbeddingOutput, ScoreOutput
from ostinato.pooling.activation import label_names, probabilities
from ostinato.pooling.inputs import Input, InputReader
from ostinato.pooling.runner import PoolingRunner
from ostinato.progress import ProgressBar
from ostinato.quoting import shown
from ostinato.runner.ambient import without_autocast, without_default_device
from ostinato.runner.startup.build import name_the_remedy

_BAR_AFTER_SECONDS = 2.0  # a bar for a shorter call would only flicker


class PoolingEngine(Owner):
    """Owns the model and the runner. One thread at a time may use it (``use``)."""

    @without_autocast
    @without_default_device
    @torch.inference_mode(False)
    def __init__(self, config: EngineConfig, task: Literal["embed", "classify"]) -> None:
        _check_options(config)
        self.config = config
        self.task = task
        self.use = ThreadUse()
        self.resolved_mode = _resolve_mode(config)
        device = config.torch_device()
        with starting:
            loaded = load_encoder(
                None if config.model is None else str(config.model),
                task=task,
                device=device,
                dtype=config.torch_dtype(device),
                max_model_len=config.max_model_len,
                random_weights=config.random_weights,
                seed=config.seed,
                show_progress=config.show_progress,
            )
            self.model, self.model_path = loaded.model, loaded.path
            self.tokenizer, self._settings = loaded.tokenizer, loaded.settings
            longest = self._longest_prompt()
            plan = self._plan(longest)
            # A sequence runs whole, so it must fit into a step.
            self.max_model_len = min(longest, plan.max_num_batched_tokens)
            self.runner = PoolingRunner(
                self.model,
                plan,
                graphs=config.graphs,
                show_progress=config.show_progress,
                verify=config.verify_policy,
            )
            try:
                self.runner.capture_model()
            except BaseException as error:
                self.runner.close()
                name_the_remedy(error)
                raise
        self._reader = InputReader(
            self.tokenizer,
            max_len=self.max_model_len,
            vocab_size=self.model.vocab_size,
            lower_case=self._settings.do_lower_case,
        )
        self._closed = False

    def _longest_prompt(self) -> int:
        asked, limit = self.config.max_model_len, self.model.max_position
        if asked is not None and asked > limit:
            raise ConfigError(
                f"max_model_len {asked} exceeds the model's limit of {limit}; lower it"
            )
        return asked or min(limit, self._settings.max_seq_length or limit)

    def _plan(self, longest: int) -> CapturePlan:
        config, device, mode = self.config, self.model.device, self.resolved_mode.mode
        max_num_seqs, max_tokens = config.batch_limits(device)
        if config.max_num_batched_tokens is None:
            max_tokens = max(max_tokens, longest)
        return CapturePlan.build(
            mode,
            () if mode is CUDAGraphMode.NONE else config.capture_sizes(device),
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_tokens,
        )

    # --- requests ------------------------------------------------------------------------------

    def embed(
        self,
        prompts: Any,
        *,
        pooling: str,
        normalize: bool,
        dimensions: int | None,
        truncate: bool,
        use_tqdm: bool | None,
    ) -> list[EmbeddingOutput]:
        self._check_task("embed")
        self._check_dimensions(dimensions)
        _check_switches(normalize=normalize, truncate=truncate)
        inputs = self._reader.prompts(prompts, truncate=truncate)
        states = self._run(inputs, self._pooling(pooling), use_tqdm)[:, :dimensions]
        if normalize:
            states = F.normalize(states, dim=-1)
        return [
            # Each has memory of its own: saving a view would save all of them.
            EmbeddingOutput(
                prompt=each.text, prompt_token_ids=each.token_ids, embedding=state.clone()
            )
            for each, state in zip(inputs, states, strict=True)
        ]

    def classify(
        self, prompts: Any, *, truncate: bool, use_tqdm: bool | None
    ) -> list[ClassificationOutput]:
        self._check_task("classify")
        _check_switches(truncate=truncate)
        inputs = self._reader.prompts(prompts, truncate=truncate)
        names = label_names(self.model.config)
        return [
            ClassificationOutput(
                prompt=each.text,
                prompt_token_ids=each.token_ids,
                probs=dict(zip(names, probs, strict=True)),
            )
            for each, probs in zip(inputs, self._probabilities(inputs, use_tqdm), strict=True)
        ]

    def score(
        self, query: Any, documents: Any, *, truncate: bool, use_tqdm: bool | None
    ) -> list[ScoreOutput]:
        self._check_task("embed", "classify")
        _check_switches(truncate=truncate)
        if self.task == "embed":
            queries, inputs = self._reader.queries(query, documents, truncate=truncate)
            states = self._run([*queries, *inputs], self._pooling("auto"), use_tqdm)
            # One query is compared with all documents, several with one each.
            ours, theirs = states[: len(queries)], states[len(queries) :]
            scores = F.cosine_similarity(ours, theirs).tolist()
        else:
            num_labels = len(label_names(self.model.config))
            if num_labels != 1:
                raise RequestError(
                    f"score needs a model with one label, and this one has {num_labels}; use "
                    "classify"
                )
            inputs = self._reader.pairs(
                query, documents, truncate=truncate, types=self.model.has_token_types
            )
            scores = [probs[0] for probs in self._probabilities(inputs, use_tqdm)]
        return [
            ScoreOutput(prompt_token_ids=each.token_ids, score=score)
            for each, score in zip(inputs, scores, strict=True)
        ]

    def _check_task(self, *tasks: str) -> None:
        if self._closed:
            raise ClosedError("the engine is closed; build a new one")
        if self.task not in tasks:
            (task,) = tasks
            raise RequestError(
                f"this model was loaded to {self.task}, not to {task}; if it can do that, load it "
                f"with LLM(..., task={task!r})"
            )

    def _check_dimensions(self, dimensions: int | None) -> None:
        size = self.model.hidden_size
        if dimensions is not None and (type(dimensions) is not int or not 1 <= dimensions <= size):
            raise RequestError(
                f"dimensions must be an integer from 1 to {size}, the size of this model's "
                f"embeddings, got {shown(dimensions)}"
            )

    def _pooling(self, asked: str) -> Pooling:
        if asked == "auto":
            return self._settings.pooling or ("last" if self.model.is_causal else "mean")
        if asked not in POOLINGS:
            raise RequestError(
                f"pooling must be one of auto, {', '.join(POOLINGS)}, got {shown(asked)}"
            )
        return asked

    # --- batches -------------------------------------------------------------------------------

    def _probabilities(self, inputs: Sequence[Input], use_tqdm: bool | None) -> list[list[float]]:
        pooling = self.model.head_pooling
        assert pooling is not None, "the model has a head"
        rows: list[list[float]] = probabilities(
            self.model.config, self._run(inputs, pooling, use_tqdm)
        ).tolist()
        return rows

    @without_autocast
    def _run(
        self, inputs: Sequence[Input], pooling: Pooling, use_tqdm: bool | None
    ) -> torch.Tensor:
        """The pooled states of all inputs in order, or their logits; float32 on the CPU."""
        order = sorted(range(len(inputs)), key=lambda index: len(inputs[index].token_ids))
        shows_bar = self.config.show_progress if use_tqdm is None else use_tqdm
        results = []
        with (
            torch.inference_mode(),
            _bar(len(inputs)) if shows_bar else nullcontext() as bar,
        ):
            for numbers in self._batches(order, inputs):
                hidden, batch = self.runner.run([inputs[number] for number in numbers])
                states = pool(hidden, batch, pooling)
                if self.task == "classify":
                    states = self.model.compute_logits(states)
                # The device goes on with the next batch meanwhile.
                results.append(states.to("cpu", non_blocking=True))
                if bar is not None:
                    bar.update(len(numbers))
            if self.model.device.type == "cuda":
                torch.cuda.current_stream(self.model.device).synchronize()
            sorted_rows = torch.cat(results)
        rows = torch.empty(sorted_rows.shape, dtype=torch.float32)
        rows[torch.tensor(order)] = sorted_rows
        return rows

    def _batches(self, order: list[int], inputs: Sequence[Input]) -> Iterator[list[int]]:
        """The numbers of the inputs of each batch, within the limits of a step."""
        plan = self.runner.plan
        batch: list[int] = []
        num_tokens = 0
        for number in order:
            length = len(inputs[number].token_ids)
            full = len(batch) == plan.max_num_seqs
            if full or (batch and num_tokens + length > plan.max_num_batched_tokens):
                yield batch
                batch, num_tokens = [], 0
            batch.append(number)
            num_tokens += length
        yield batch

    # --- ownership -----------------------------------------------------------------------------

    def close(self) -> None:
        """Free the graphs and the weights. Closing twice is harmless."""
        if self._closed:
            return
        self._closed = True
        try:
            self.runner.close()
        finally:
            del self.model, self.runner.model

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise TypeError(
            "an engine cannot be copied or pickled: it owns graphs and the memory they point to; "
            "build another LLM with LLM.from_config(llm.config)"
        )


def _check_options(config: EngineConfig) -> None:
    """Raise for options that only models that generate have."""
    if config.world_size > 1:
        raise ConfigError(
            f"models that embed or classify run on one rank, not {config.world_size}; leave out "
            "tensor_parallel_size, ulysses_sequence_parallel_size and data_parallel_size, and "
            "start one LLM per GPU"
        )
    if config.graphs.compile:
        raise ConfigError(
            f"compile={config.graphs.compile!r} is for models that generate; leave it out"
        )
    if config.graphs.lazy_capture:
        raise ConfigError("lazy_capture is for models that generate; leave it out")
    if config.graph_memory is not None:
        raise ConfigError(
            f"graph_memory {config.graph_memory:,} is for models that generate; leave it out, and "
            "give fewer or smaller capture_sizes"
        )
    if config.swiftkv_layers is not None:
        raise ConfigError("swiftkv_layers is for models that generate; leave it out")
    if config.batch_invariant:
        raise ConfigError("batch_invariant is for models that generate; leave it out")
    if config.speculative is not None:
        raise ConfigError("speculative is for models that generate; leave it out")
    if config.offload is not None:
        raise ConfigError("offload is for models that generate; leave it out")
    if config.enable_sleep_mode:
        raise ConfigError("enable_sleep_mode is for models that generate; leave it out")
    if config.enable_lora:
        raise ConfigError(
            "enable_lora is for models that generate; merge the adapter into the checkpoint with "
            "PEFT (merge_and_unload)"
        )


def _resolve_mode(config: EngineConfig) -> ResolvedMode:
    """The graph mode. Attention is launched for a batch's lengths, so no graph can hold it."""
    requested = config.graphs.mode
    if requested is None:
        requested = CUDAGraphMode.PIECEWISE
    assert isinstance(requested, CUDAGraphMode)
    return resolve_mode(requested, AttentionCGSupport.NEVER, piecewise_available=True)


def _check_switches(**switches: object) -> None:
    for name, value in switches.items():
        if not isinstance(value, bool):
            raise RequestError(f"{name} must be True or False, got {shown(value)}")


def _bar(total: int) -> Any:
    return ProgressBar(total=total, desc="texts", delay=_BAR_AFTER_SECONDS)
