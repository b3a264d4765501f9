"""``LLM``: a model in a script. Prompts in, text out."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import fields
from pathlib import Path
from typing import Any, NoReturn

import torch
from tqdm import tqdm

from ostinato.config import EngineConfig
from ostinato.engine.completion import CheckedRequest
from ostinato.engine.engine import Engine, Submission
from ostinato.engine.text_stream import TextStream
from ostinato.engine.thread_use import ThreadUse, one_thread
from ostinato.graphs.capture.closing import Owner
from ostinato.options import described, same_options_as
from ostinato.outputs import RequestOutput
from ostinato.sampling_params import SamplingParams
from ostinato.text.chat import Message, list_conversations, render_chat
from ostinato.text.prompts import Prompt, list_params, list_prompts, read_prompt
from ostinato.text.template_process import TemplateProcess

_BAR_AFTER_SECONDS = 2.0  # a bar for what is over at once would only flicker


class LLM(Owner):
    """A language model that is ready to generate; graphs are captured when it is built.

    Use it in ``with``, or ``close()`` it, to give the memory back. For one thread at a time: while
    one is in a call or has a stream open, others get ``ConcurrentUseError``.

    It runs on ``tensor_parallel_size`` x ``ulysses_sequence_parallel_size`` ranks, one GPU each, or
    processes on the CPU. In a plain process it starts the other ranks itself. Under ``torchrun``
    every rank runs the script and makes the same calls, and every rank gets the results; there the
    number of ranks must be right, and the network between them trusted: what they send is neither
    encrypted nor signed.

    That a rank died or hangs is known to the others within ``rank_timeout_s`` and a tenth of it,
    and takes them down with an error that names it; a process that cannot be set free from waiting
    for that rank ends up to a quarter of the time later. A rank hangs if in all that time it does
    not move on in a step while others wait for it, even if it is only slow (from seven tenths of
    the time on it may be taken for hung); all ranks slow together do not. Under ``torchrun`` that
    includes the way to a call that rank 0 has begun. Rank 0 may take any time between calls, and
    loading and capturing may take any time on any rank.
    """

    @same_options_as(EngineConfig)
    def __init__(self, *args: Any, **options: Any) -> None:
        self.config = EngineConfig(*args, **options)
        self.engine = Engine(self.config)
        self._templates = TemplateProcess()

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
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool | None = None,
    ) -> list[RequestOutput]:
        """Complete all prompts; results in the order of the prompts.

        A prompt is text or token ids: a list, or a 1-D NumPy array or tensor of integers on any
        device. Several are a list of those, or a 2-D array or tensor, each row a prompt of its
        own: there is no padding, so all its rows are as long as they look.

        ``sampling_params``: for all prompts, or a list with those of each; None: the defaults.
        ``use_tqdm``: whether a bar shows how far it is, if it takes long (None: ``show_progress``).
        """
        prepared = self._prepare(list_prompts(prompts), sampling_params)
        return self._generate(*prepared, use_tqdm=use_tqdm)

    def _generate(
        self,
        outputs: list[RequestOutput],
        requests: list[CheckedRequest],
        *,
        use_tqdm: bool | None,
    ) -> list[RequestOutput]:
        shows_bar = self.config.show_progress if use_tqdm is None else use_tqdm
        return self.engine.sharing.call(lambda: self._complete(outputs, requests, shows_bar))

    @torch.inference_mode()
    def _complete(
        self, outputs: list[RequestOutput], requests: list[CheckedRequest], shows_bar: bool
    ) -> list[RequestOutput]:
        submission = Submission(self.engine, requests, every_token=False)
        self.use.cover()
        try:
            with _bar(submission.num_completions) if shows_bar else nullcontext() as bar:
                while submission.num_left:
                    for number, completion in submission.step():
                        if not completion.finished:
                            continue  # of requests that the engine watches
                        output = outputs[number]
                        output.outputs.append(completion.output)
                        if completion.output.index == 0:
                            output.num_cached_tokens = completion.request.num_cached_tokens
                        if bar is not None:
                            bar.update()
        finally:
            submission.abort()
        for output in outputs:
            output.outputs.sort(key=lambda completed: completed.index)
        return outputs

    @one_thread()
    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> TextStream:
        """Complete all prompts and yield what each step adds. Leaving the loop aborts the rest.

        Inside the loop this thread may generate as well; other threads are refused until it ends.
        """
        _, requests = self._prepare(
            list_prompts(prompts), sampling_params
        )  # not at the first next()
        return TextStream(self.engine, requests)

    @one_thread()
    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation, or several; each a list of {"role": ..., "content": ...}.

        A content is text, or a list of text parts, which become lines. The rest is as in
        ``generate``.
        """
        prompts = [(name, self._render(each, name)) for name, each in list_conversations(messages)]
        return self._generate(*self._prepare(prompts, sampling_params), use_tqdm=use_tqdm)

    @one_thread()
    def render_chat(self, messages: Sequence[Message]) -> list[int]:
        """The token ids of a conversation, up to where the answer begins."""
        return self._render(messages)

    def _render(self, messages: Any, name: str = "messages") -> list[int]:
        engine = self.engine
        return render_chat(self._templates, engine.tokenizer, messages, engine.max_model_len, name)

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

    # --- ownership -----------------------------------------------------------------------------

    def close(self) -> None:
        """Give back the graphs, the KV cache and the weights. Closing twice is harmless.

        All of it is given back whatever a part of it raises, and where no memory is left.
        """
        self.engine.runner.pool.free_spare()
        self._close()

    @one_thread("LLM.close")
    def _close(self) -> None:
        try:
            self.engine.close()
        finally:
            self._templates.close()

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise TypeError(
            "an LLM cannot be copied or pickled: it owns graphs and the memory they point to; "
            "build another one with LLM.from_config(llm.config)"
        )


def _bar(total: int) -> Any:
    return tqdm(total=total, desc="generating", delay=_BAR_AFTER_SECONDS)


LLM.__doc__ = f"{inspect.cleandoc(LLM.__doc__ or '')}\n\n{described(list(fields(EngineConfig)))}"
