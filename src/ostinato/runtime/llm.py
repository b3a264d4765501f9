"""``LLM``: a model in a script. Prompts in, text out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from types import TracebackType
from typing import Any, TypeAlias

import torch
from tqdm import tqdm

from ostinato.errors import RequestError
from ostinato.runtime.config import EngineConfig, GraphConfig
from ostinato.runtime.engine import Completion, Engine
from ostinato.runtime.outputs import RequestOutput, TextDelta
from ostinato.runtime.sampling_params import SamplingParams

# Text, token ids, or {"prompt": text} / {"prompt_token_ids": ids} as in vLLM.
Prompt: TypeAlias = str | Sequence[int] | Mapping[str, Any]
Message: TypeAlias = Mapping[str, Any]

_BAR_AFTER_SECONDS = 2.0  # a bar for what is over at once would only flicker


class LLM:
    """A language model that is ready to generate; graphs are captured when it is built.

    ``model``: None for the embedded SmolLM2-135M-Instruct; a directory or hub name of a safetensors
    checkpoint; or, with ``random_weights``, the name of a shape. Limits that are None are chosen
    for the device. Use it in ``with``, or ``close()`` it, to give the memory back. For one thread.

    ``swiftkv_layers`` makes a SwiftKV model of a plain one: all layers after so many take their
    keys and values from the output of these, and run only for the tokens whose logits are wanted.
    Without training for it the text suffers; checkpoints that were trained say so themselves.

    With ``tensor_parallel`` x ``sequence_parallel`` more than one it runs on so many ranks, one GPU
    each, or processes on the CPU. In a plain process it starts the other ranks itself. Under
    ``torchrun`` every rank runs the script and makes the same calls, and every rank gets the
    results; there the number of ranks must be right. ``tensor_parallel`` splits the weights;
    ``sequence_parallel`` splits the tokens of a batch, and batches of up to
    ``shift_parallel_threshold`` tokens use all ranks for the weights instead.

    That a rank died or hangs is known to the others within ``rank_timeout_s`` and a tenth of it,
    and takes them down with an error that names it; a process that cannot be set free from waiting
    for that rank ends up to a quarter of the time later. A rank hangs if in all that time it does
    not move on in a step while others wait for it, even if it is only slow (from seven tenths of
    the time on it may be taken for hung); all ranks slow together do not. Under ``torchrun`` that
    includes the way to a call that rank 0 has begun. Rank 0 may take any time between calls, and
    loading and capturing may take any time on any rank.
    """

    def __init__(
        self,
        model: str | Path | None = None,
        *,
        device: str = "auto",
        dtype: str | torch.dtype = "auto",
        graphs: GraphConfig | None = None,
        max_num_seqs: int | None = None,
        max_num_batched_tokens: int | None = None,
        max_model_len: int | None = None,
        kv_cache_memory: int | str | None = None,
        gpu_memory_utilization: float = 0.9,
        attention: str = "auto",
        block_size: int = 16,
        prefix_reuse: bool = True,
        prefill_chunk: int | None = None,
        overlap: bool | None = None,
        random_weights: bool = False,
        seed: int = 0,
        swiftkv_layers: int | None = None,
        show_progress: bool = True,
        tensor_parallel: int = 1,
        sequence_parallel: int = 1,
        shift_parallel_threshold: int | None = None,
        rank_timeout_s: float = 30.0,
    ) -> None:
        self.config = EngineConfig(
            model=None if model is None else str(model),
            device=device,
            dtype=dtype,
            graphs=graphs or GraphConfig(),
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=max_model_len,
            kv_cache_memory=kv_cache_memory,
            gpu_memory_utilization=gpu_memory_utilization,
            attention=attention,
            block_size=block_size,
            prefix_reuse=prefix_reuse,
            prefill_chunk=prefill_chunk,
            overlap=overlap,
            random_weights=random_weights,
            seed=seed,
            swiftkv_layers=swiftkv_layers,
            show_progress=show_progress,
            tensor_parallel=tensor_parallel,
            sequence_parallel=sequence_parallel,
            shift_parallel_threshold=shift_parallel_threshold,
            rank_timeout_s=rank_timeout_s,
        )
        self.engine = Engine(self.config)

    @classmethod
    def from_config(cls, config: EngineConfig) -> LLM:
        """The same from a configuration that exists already."""
        return cls(**{field.name: getattr(config, field.name) for field in fields(config)})

    @property
    def model_path(self) -> Path | None:
        """The directory the model was loaded from; None for random weights of a named shape."""
        return self.engine.model_path

    @property
    def tokenizer(self) -> Any:
        return self.engine.tokenizer

    # --- generating ----------------------------------------------------------------------------

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Complete all prompts; results in the order of the prompts."""
        outputs, completions = self._prepare(prompts, params)
        return self.engine.sharing.call(lambda: self._complete(outputs, completions))

    def _complete(
        self, outputs: list[RequestOutput], completions: list[_Numbered]
    ) -> list[RequestOutput]:
        with self._running(completions), self._bar(len(completions)) as bar:
            num_left = self._unfinished(completions)
            while num_left:
                if self.engine.step():
                    num_left = self._unfinished(completions)
                    bar.update(len(completions) - num_left - bar.n)
        for number, completion in completions:
            if completion.output.index == 0:
                outputs[number].num_cached_tokens = completion.request.num_cached_tokens
        return outputs

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> Iterator[TextDelta]:
        """Complete all prompts and yield what each step adds. Leaving the loop aborts the rest."""
        _, completions = self._prepare(prompts, params)  # checked now, not at the first next()
        return self.engine.sharing.iterate(self._stream(completions))

    def _stream(self, completions: list[_Numbered]) -> Iterator[TextDelta]:
        shown = [(0, 0)] * len(completions)
        with self._running(completions):
            finished = False
            while not finished:
                # Another call may finish them while the caller holds a delta, so look first.
                finished = not self._unfinished(completions)
                for position, (number, completion) in enumerate(completions):
                    output, (num_chars, num_tokens) = completion.output, shown[position]
                    if len(output.token_ids) == num_tokens:
                        continue
                    if not completion.finished:
                        completion.read_text()
                    shown[position] = len(output.text), len(output.token_ids)
                    yield TextDelta(
                        prompt_index=number,
                        index=output.index,
                        text=output.text[num_chars:],
                        token_ids=output.token_ids[num_tokens:],
                        finish_reason=output.finish_reason,
                    )
                if self._unfinished(completions):
                    self.engine.step()

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation, or several; each a list of {"role": ..., "content": ...}."""
        if not messages:
            raise RequestError("the conversation is empty; give at least one message")
        one = isinstance(messages[0], Mapping)
        conversations: Sequence[Any] = [messages] if one else messages
        return self.generate([self.render_chat(each) for each in conversations], params)

    def render_chat(self, messages: Sequence[Message]) -> list[int]:
        """The token ids of a conversation, up to where the answer begins."""
        tokenizer = self.engine.tokenizer
        if tokenizer is None or not getattr(tokenizer, "chat_template", None):
            raise RequestError(
                "this model has no chat template, so it cannot take messages; use generate()"
            )
        if not messages:
            raise RequestError("the conversation is empty; give at least one message")
        ids: list[int] = tokenizer.apply_chat_template(
            list(messages), add_generation_prompt=True, tokenize=True, return_dict=False
        )
        return ids

    # --- requests ------------------------------------------------------------------------------

    def _prepare(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None,
    ) -> tuple[list[RequestOutput], list[_Numbered]]:
        """Check everything before anything runs."""
        listed = _as_list(prompts)
        if not listed:
            raise RequestError("there are no prompts; give at least one")
        each_params = _as_params(params, len(listed))
        outputs: list[RequestOutput] = []
        completions: list[_Numbered] = []
        for number, (prompt, its_params) in enumerate(zip(listed, each_params, strict=True)):
            text, token_ids = self._encode(prompt)
            made = self.engine.prepare_request(token_ids, its_params)
            completions += [(number, completion) for completion in made]
            outputs.append(
                RequestOutput(
                    request_id=made[0].request.request_id.rpartition(".")[0],
                    prompt=text,
                    prompt_token_ids=made[0].request.prompt_token_ids,
                    outputs=[completion.output for completion in made],
                )
            )
        return outputs, completions

    def _encode(self, prompt: Any) -> tuple[str | None, Sequence[int]]:
        if isinstance(prompt, Mapping):
            unknown = sorted(set(prompt) - {"prompt", "prompt_token_ids"})
            if unknown or len(prompt) != 1:
                raise RequestError(
                    f"a prompt has one of the keys 'prompt' and 'prompt_token_ids', got "
                    f"{sorted(prompt)}"
                )
            (prompt,) = prompt.values()
        if not isinstance(prompt, str):
            token_ids: Sequence[int] = prompt
            return None, token_ids
        if self.engine.tokenizer is None:
            raise RequestError(
                "this model has no tokenizer (random weights of a named shape have none); give "
                "the prompt as token ids"
            )
        return prompt, self.engine.tokenizer.encode(prompt)

    @staticmethod
    def _unfinished(completions: list[_Numbered]) -> int:
        return sum(not completion.finished for _, completion in completions)

    def _bar(self, total: int) -> Any:
        return tqdm(
            total=total,
            desc="generating",
            delay=_BAR_AFTER_SECONDS,
            disable=not self.config.show_progress,
        )

    @contextmanager
    def _running(self, completions: list[_Numbered]) -> Iterator[None]:
        """The requests are in the engine inside the block, and gone after it, whatever happens."""
        try:
            for _, completion in completions:
                self.engine.add(completion)
            yield
        finally:
            for _, completion in completions:
                if not completion.finished:
                    self.engine.abort(completion)

    # --- ownership -----------------------------------------------------------------------------

    def close(self) -> None:
        """Give back the graphs, the KV cache and the weights. Closing twice is harmless."""
        self.engine.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


_Numbered: TypeAlias = tuple[int, Completion]  # with the number of its prompt


def _as_list(prompts: Any) -> list[Prompt]:
    """One prompt, or several: a list of integers is one prompt of token ids."""
    if isinstance(prompts, (str, Mapping)):
        return [prompts]
    if not isinstance(prompts, Sequence):
        raise RequestError(f"prompts are text or token ids, one or a list, got {prompts!r}")
    if prompts and all(type(item) is int for item in prompts):
        return [prompts]
    for prompt in prompts:
        if not isinstance(prompt, (str, Mapping, Sequence)):
            raise RequestError(f"a prompt is text or a list of token ids, got {prompt!r}")
    return list(prompts)


def _as_params(params: Any, count: int) -> list[SamplingParams]:
    if params is None:
        return [SamplingParams()] * count
    if isinstance(params, SamplingParams):
        return [params] * count
    listed = list(params) if isinstance(params, Sequence) else [params]
    if not all(isinstance(each, SamplingParams) for each in listed):
        raise RequestError(f"params are SamplingParams, one or one per prompt, got {params!r}")
    if len(listed) != count:
        raise RequestError(f"{len(listed)} SamplingParams for {count} prompts; give one for each")
    return listed
