"""``AsyncLLM``: an ``LLM`` for event loops. Many tasks ask at once, and none waits for another."""

from __future__ import annotations

import asyncio
import copy
import inspect
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any, Literal, NoReturn, Self, TypeVar

from ostinato import other_engines
from ostinato.config import EngineConfig
from ostinato.engine.requests.prompt_reader import PromptReader, ReadPrompt
from ostinato.errors import ConfigError, RequestError
from ostinato.graphs.capture.closing import Owner, close_each
from ostinato.graphs.trust.ledger.ledger import Ledger
from ostinato.llm import LLM
from ostinato.models.given_tensors import NamedTensors
from ostinato.options import described, same_options_as, user_call
from ostinato.outputs import ClassificationOutput, EmbeddingOutput, RequestOutput, ScoreOutput
from ostinato.ranks.sharing import Unshared
from ostinato.report.records import RunReport
from ostinato.sampling_params import SamplingParams
from ostinato.serving.async_stream import AsyncStream
from ostinato.serving.engine_stats import engine_stats
from ostinato.serving.engine_thread import EngineThread, Observer
from ostinato.serving.overview import Overview, overview
from ostinato.serving.records import EngineStats
from ostinato.serving.running_request import RunningRequest
from ostinato.text.chat import Message
from ostinato.text.chat_options import ChatOptions
from ostinato.text.prompts import Prompt, list_adapters, list_params

T = TypeVar("T")


class AsyncLLM(Owner):
    """A language model for asyncio, with the options of ``LLM``.

    The engine runs in a thread of its own and batches the requests of all tasks; prompts are read
    in another. Loops never wait for either: use one ``AsyncLLM`` from any number of tasks, loops
    and threads. Building it takes as long as an ``LLM`` and blocks: do it before the loop starts,
    or write ``await asyncio.to_thread(AsyncLLM, ...)``.

    A request whose task is cancelled, or whose stream is closed or dropped, is aborted before the
    next step. If the engine fails, every waiting caller gets ``EngineFailedError``, and so does
    every later one.

    Use it in ``async with`` or ``with``, or ``close()`` it, to free the memory; unfinished requests
    then get ``ClosedError``. It starts its ranks itself, so it does not run under ``torchrun``.
    """

    @same_options_as(EngineConfig)
    def __init__(self, *args: Any, **options: Any) -> None:
        self.config = EngineConfig(*args, **options)
        thread = EngineThread(partial(_build, self.config))
        self._thread = thread
        llm = thread.llm
        self.task: Literal["generate", "embed", "classify"] = llm.task
        self.max_model_len: int = llm.max_model_len
        self.max_num_seqs: int = llm.max_num_seqs
        self.model_path = llm.model_path
        self.max_prompt_tokens: int | None = None  # a stricter limit, for servers
        # Tokenizers keep settings that a call may change, so each thread has its own.
        self.tokenizer = copy.deepcopy(llm.tokenizer)
        self._prompts: PromptReader | None = None
        if self.task == "generate":
            self._prompts = PromptReader(self.tokenizer, llm.engine.images, self.max_model_len)
        self._reading = ThreadPoolExecutor(max_workers=1, thread_name_prefix="ostinato-prompts")
        # Also when the interpreter ends: the thread must not be inside a step then.
        self._end = weakref.finalize(self, _close, thread, self._reading, self._prompts)

    @classmethod
    def from_config(cls, config: EngineConfig) -> AsyncLLM:
        """Build one from an existing configuration."""
        return cls(**{field.name: getattr(config, field.name) for field in fields(config)})

    @property
    def failure(self) -> str | None:
        """Why the engine takes no more requests, if it failed."""
        return self._thread.failure

    @property
    def is_closed(self) -> bool:
        """Whether ``close()`` or ``aclose()`` was called."""
        return not self._end.alive

    @property
    def takes_images(self) -> bool:
        """Whether prompts may have images."""
        return self.task == "generate" and self._thread.llm.engine.images.are_taken

    @property
    def adapters(self) -> list[str]:
        """The names of the loaded LoRA adapters."""
        return self._thread.llm.adapters if self.task == "generate" else []

    # --- generating ----------------------------------------------------------------------------

    @user_call(other_engines.CALL_OPTIONS)
    async def generate(
        self,
        prompt: Prompt | Sequence[Message],
        sampling_params: SamplingParams | None = None,
        *,
        adapter: str | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> RequestOutput:
        """Complete one prompt, and return all of it.

        ``prompt``: text, token ids, or a dict with images, as in ``LLM.generate``; or a
        conversation, as in ``LLM.chat``. ``sampling_params``: None for the defaults. ``adapter``:
        the name of a loaded LoRA adapter. For several prompts, use ``asyncio.gather``.

        Of a conversation, ``tools``: those that its template tells the model about, in OpenAI's
        form; ``chat_template_kwargs``: variables of the template, as in ``LLM.chat``.
        """
        options = ChatOptions(tools=tools, chat_template_kwargs=chat_template_kwargs)
        prepare = partial(
            self._prepare, prompt, sampling_params, adapter, options, every_token=False
        )
        return await AsyncStream(self._thread, prepare).finish()

    @user_call(other_engines.CALL_OPTIONS)
    def stream(
        self,
        prompt: Prompt | Sequence[Message],
        sampling_params: SamplingParams | None = None,
        *,
        adapter: str | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> AsyncStream:
        """Complete one prompt, and yield the text of each step: ``async for delta in ...``.

        ``prompt``, ``sampling_params``, ``adapter``, ``tools`` and ``chat_template_kwargs`` are as
        in ``generate``.
        """
        options = ChatOptions(tools=tools, chat_template_kwargs=chat_template_kwargs)
        prepare = partial(
            self._prepare, prompt, sampling_params, adapter, options, every_token=True
        )
        return AsyncStream(self._thread, prepare)

    async def _prepare(
        self, prompt: Any, params: Any, adapter: Any, options: ChatOptions, *, every_token: bool
    ) -> RunningRequest:
        (its_params,), (its_adapter,) = list_params(params, 1), list_adapters(adapter, 1)
        read = await self.read(partial(_read, prompt=prompt, options=options))
        most = self.max_prompt_tokens
        if most is not None and len(read.token_ids) > most:
            raise RequestError(
                f"{read.name} has {len(read.token_ids)} tokens, but the limit is {most} "
                "(max_prompt_tokens); shorten it"
            )
        if its_params.structure is not None:  # here, so that the engine never waits for it
            grammars = self._thread.llm.engine.grammars
            await asyncio.to_thread(grammars.compile, its_params.structure)
        return RunningRequest(read, its_params, its_adapter, every_token=every_token)

    async def read(self, function: Callable[[PromptReader], T]) -> T:
        """Run ``function`` in the thread that reads prompts."""
        prompts = self._prompts
        if prompts is None:
            raise RequestError(
                f"this model was loaded to {self.task}, not to generate; if it can do that, load "
                "it with AsyncLLM(..., task='generate')"
            )
        loop = asyncio.get_running_loop()
        try:
            reading = loop.run_in_executor(self._reading, function, prompts)
        except RuntimeError:  # it was shut down
            raise self._thread.gone() from None
        return await reading

    # --- pooling -------------------------------------------------------------------------------

    async def embed(
        self, prompts: Prompt | Sequence[Prompt], **options: Any
    ) -> list[EmbeddingOutput]:
        """Embed all prompts; ``options`` are those of ``LLM.embed``."""
        return await self.call(lambda llm: llm.embed(prompts, use_tqdm=False, **options))

    async def score(
        self,
        query: Prompt | Sequence[Prompt],
        documents: Prompt | Sequence[Prompt],
        **options: Any,
    ) -> list[ScoreOutput]:
        """How well documents match a query; ``options`` are those of ``LLM.score``."""
        return await self.call(lambda llm: llm.score(query, documents, use_tqdm=False, **options))

    async def classify(
        self, prompts: Prompt | Sequence[Prompt], **options: Any
    ) -> list[ClassificationOutput]:
        """The probabilities of the labels; ``options`` are those of ``LLM.classify``."""
        return await self.call(lambda llm: llm.classify(prompts, use_tqdm=False, **options))

    # --- the engine ----------------------------------------------------------------------------

    async def load_adapter(self, name: str, path: str | Path) -> None:
        """Load the LoRA adapter of directory ``path`` as ``name``, between two steps.

        As ``LLM.load_adapter``: an adapter of that name is replaced.
        """
        await self.call(lambda llm: llm.load_adapter(name, path))

    async def unload_adapter(self, name: str) -> None:
        """Forget an adapter. Unfinished requests keep it until they end."""
        await self.call(lambda llm: llm.unload_adapter(name))

    async def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes between two steps; unfinished requests go on."""
        await self.call(lambda llm: llm.reset_prefix_cache())

    async def update_weights(
        self, weights: str | PathLike[str] | NamedTensors, *, keep_prefix_cache: bool = False
    ) -> None:
        """Overwrite weights of the model in place; ``weights`` and ``keep_prefix_cache`` are as in
        ``LLM.update_weights``.

        Raises ``RequestError`` if requests are unfinished: wait for them, or cancel them, first.
        Requests that come in the meantime wait. An iterable is read in the engine's thread.
        """
        await self.call(
            lambda llm: llm.update_weights(weights, keep_prefix_cache=keep_prefix_cache)
        )

    async def sleep(self, level: Literal[1, 2] = 1) -> None:
        """Release the KV cache and the weights; ``level`` is as in ``LLM.sleep``.

        Raises ``RequestError`` if requests are unfinished. Those that come while it is asleep get
        ``AsleepError``.
        """
        await self.call(lambda llm: llm.sleep(level))

    async def wake(self) -> None:
        """Map the memory again, as ``LLM.wake`` does."""
        await self.call(lambda llm: llm.wake())

    async def clear_graphs(self) -> None:
        """Drop all graphs between two steps; unfinished requests go on eagerly."""
        await self.call(lambda llm: llm.clear_graphs())

    async def capture_graphs(self) -> int:
        """Capture missing graphs, as ``LLM.capture_graphs``; no request may be unfinished."""
        return await self.call(lambda llm: llm.capture_graphs())

    async def stats(self) -> EngineStats:
        """The counts of the engine, as of the end of the current step."""
        thread = self._thread
        return await self.call(lambda llm: engine_stats(llm, thread))

    async def overview(self) -> Overview:
        """Those counts, with the plan, its graphs and the requests in flight."""
        thread = self._thread
        return await self.call(lambda llm: overview(llm, thread))

    async def ledger(self) -> Ledger:
        """Which memory the captured graphs hold (``LLM.ledger``).

        Use it in the engine's thread: ``await call(lambda llm: llm.ledger().check())``.
        """
        return await self.call(lambda llm: llm.ledger())

    async def report(self) -> RunReport:
        """What the graphs did so far (``LLM.report``). Steps wait while it reads their nodes."""
        return await self.call(lambda llm: llm.report())

    def observe(self, observer: Observer) -> None:
        """Have ``observer`` called with the record of each request that ends, in the engine's
        thread: it must be quick. What it raises is logged."""
        self._thread.observers.append(observer)

    async def call(self, function: Callable[[LLM], T]) -> T:
        """Run ``function`` with the ``LLM``, in its thread, between two steps."""
        return await self._thread.call(function)

    # --- ownership -----------------------------------------------------------------------------

    def close(self) -> None:
        """Abort unfinished requests and free the model. Waits for the current step.

        Closing twice is harmless. In a coroutine, use ``aclose()``.
        """
        self._end()

    async def aclose(self) -> None:
        """``close()``, without keeping the loop waiting."""
        await asyncio.to_thread(self._end)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.aclose()

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise TypeError(
            "an AsyncLLM cannot be copied or pickled: it owns graphs and the memory they point to; "
            "build another one with AsyncLLM.from_config(llm.config)"
        )


def _build(config: EngineConfig) -> LLM:
    llm = LLM.from_config(config)
    if llm.task == "generate" and not isinstance(llm.engine.sharing, Unshared):
        llm.close()
        raise ConfigError(
            "an AsyncLLM starts its ranks itself, and every rank would need the same requests "
            "under torchrun; start one plain process without torchrun"
        )
    return llm


def _read(reader: PromptReader, prompt: Any, options: ChatOptions) -> ReadPrompt:
    is_list = isinstance(prompt, Sequence) and not isinstance(prompt, str | bytes | bytearray)
    if is_list and prompt and all(isinstance(each, Mapping) for each in prompt):
        return reader.read("messages", reader.conversation("messages", prompt, options))
    for name in options.given:
        raise RequestError(f"{name} are for conversations; give messages, or leave {name} out")
    return reader.read("the prompt", prompt)


def _close(thread: EngineThread, reading: ThreadPoolExecutor, prompts: PromptReader | None) -> None:
    steps: list[Callable[[], object]] = [thread.close, partial(reading.shutdown, wait=False)]
    if prompts is not None:
        steps.append(prompts.close)
    close_each(steps)


AsyncLLM.__doc__ = (
    f"{inspect.cleandoc(AsyncLLM.__doc__ or '')}\n\n{described(list(fields(EngineConfig)))}"
)
