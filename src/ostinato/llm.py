"""``LLM``: a model in a script. Prompts in, text out."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import fields
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

import torch
from tqdm import tqdm

from ostinato.config import EngineConfig, GraphConfig
from ostinato.engine.engine import CheckedRequest, Engine
from ostinato.engine.submission import Submission
from ostinato.engine.text_stream import TextStream
from ostinato.engine.thread_use import ThreadUse, one_thread
from ostinato.outputs import RequestOutput
from ostinato.sampling_params import SamplingParams
from ostinato.text.chat import Message, list_conversations, render_chat
from ostinato.text.prompts import Prompt, list_params, list_prompts, read_prompt

_BAR_AFTER_SECONDS = 2.0  # a bar for what is over at once would only flicker


class LLM:
    """A language model that is ready to generate; graphs are captured when it is built.

    ``model``: None for the embedded SmolLM2-135M-Instruct; a directory or hub name of a safetensors
    checkpoint; or, with ``random_weights``, the name of a shape. Limits that are None are chosen
    for the device. Use it in ``with``, or ``close()`` it, to give the memory back. For one thread
    at a time: while one is in a call or has a stream open, others get ``ConcurrentUseError``.

    ``swiftkv_layers`` makes a SwiftKV model of a plain one: all layers after so many take their
    keys and values from the output of these, and run only for the tokens whose logits are wanted.
    Without training for it the text suffers; checkpoints that were trained say so themselves.

    With ``tensor_parallel`` x ``sequence_parallel`` more than one it runs on so many ranks, one GPU
    each, or processes on the CPU. In a plain process it starts the other ranks itself. Under
    ``torchrun`` every rank runs the script and makes the same calls, and every rank gets the
    results; there the number of ranks must be right, and the network between them trusted: what
    they send is neither encrypted nor signed. ``tensor_parallel`` splits the weights;
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

    @property
    def use(self) -> ThreadUse:
        """Who is in the engine."""
        return self.engine.use

    # --- generating ----------------------------------------------------------------------------

    @one_thread()
    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Complete all prompts; results in the order of the prompts.

        A prompt is text or token ids: a list, or a 1-D NumPy array or tensor of integers on any
        device. Several are a list of those, or a 2-D array or tensor, each row a prompt of its
        own: there is no padding, so all its rows are as long as they look.
        """
        return self._generate(*self._prepare(list_prompts(prompts), params))

    def _generate(
        self, outputs: list[RequestOutput], requests: list[CheckedRequest]
    ) -> list[RequestOutput]:
        return self.engine.sharing.call(lambda: self._complete(outputs, requests))

    def _complete(
        self, outputs: list[RequestOutput], requests: list[CheckedRequest]
    ) -> list[RequestOutput]:
        submission = Submission(self.engine, requests, every_token=False)
        try:
            with self._bar(submission.num_completions) as bar:
                while submission.num_left:
                    for number, completion in submission.start_some():
                        outputs[number].outputs.append(completion.output)
                    self.engine.step()
                    for number, completion in submission.news():
                        if completion.output.index == 0:
                            cached = completion.request.num_cached_tokens
                            outputs[number].num_cached_tokens = cached
                        if bar is not None and completion.finished:
                            bar.update()
        finally:
            submission.abort()
        return outputs

    @one_thread()
    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> TextStream:
        """Complete all prompts and yield what each step adds. Leaving the loop aborts the rest.

        Inside the loop this thread may generate as well; other threads are refused until it ends.
        """
        _, requests = self._prepare(list_prompts(prompts), params)  # not at the first next()
        return TextStream(self.engine, requests)

    @one_thread()
    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation, or several; each a list of {"role": ..., "content": ...}.

        A content is text, or a list of text parts, which become lines.
        """
        prompts = [(name, self._render(each, name)) for name, each in list_conversations(messages)]
        return self._generate(*self._prepare(prompts, params))

    @one_thread()
    def render_chat(self, messages: Sequence[Message]) -> list[int]:
        """The token ids of a conversation, up to where the answer begins."""
        return self._render(messages)

    def _render(self, messages: Any, name: str = "messages") -> list[int]:
        engine = self.engine
        return render_chat(engine.tokenizer, messages, engine.max_model_len, name)

    # --- requests ------------------------------------------------------------------------------

    def _prepare(
        self,
        prompts: list[tuple[str, Any]],
        params: SamplingParams | Sequence[SamplingParams] | None,
    ) -> tuple[list[RequestOutput], list[CheckedRequest]]:
        """Check everything before anything runs. Prompts come with what errors call them."""
        each_params = list_params(params, len(prompts))
        outputs: list[RequestOutput] = []
        requests: list[CheckedRequest] = []
        for (name, prompt), its_params in zip(prompts, each_params, strict=True):
            text, token_ids = read_prompt(
                name, prompt, self.engine.tokenizer, self.engine.max_model_len
            )
            request = self.engine.check_request(token_ids, its_params, name=name)
            requests.append(request)
            outputs.append(
                RequestOutput(
                    request_id=request.request_id,
                    prompt=text,
                    prompt_token_ids=request.prompt_token_ids,
                    outputs=[],
                )
            )
        return outputs, requests

    def _bar(self, total: int) -> Any:
        if not self.config.show_progress:  # tqdm takes a lock of the whole process even then
            return nullcontext()
        return tqdm(total=total, desc="generating", delay=_BAR_AFTER_SECONDS)

    # --- ownership -----------------------------------------------------------------------------

    def close(self) -> None:
        """Give back the graphs, the KV cache and the weights. Closing twice is harmless.

        All of it is given back whatever a part of it raises, and where no memory is left.
        """
        self.engine.runner.pool.free_spare()
        self._close()

    @one_thread("LLM.close")
    def _close(self) -> None:
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

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise TypeError(
            "an LLM cannot be copied or pickled: it owns graphs and the memory they point to; "
            "build another one with LLM.from_config(llm.config)"
        )
