"""``LLM``: a model in a script. Prompts in; text, embeddings, scores or classes out.

Here: what it is, and generating. It takes its other calls from ``LifecycleCalls`` and
``PoolingCalls``. What makes the module long is ``help(LLM)``, where users read.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NoReturn

import torch

from ostinato import other_engines
from ostinato.config import EngineConfig
from ostinato.engine.engine import Engine, Submission
from ostinato.engine.lifecycle.calls import LifecycleCalls
from ostinato.engine.lifecycle.lifecycle import EngineLifecycle
from ostinato.engine.requests.checked_request import CheckedRequest
from ostinato.engine.requests.prompt_reader import PromptReader
from ostinato.engine.text_stream import TextStream
from ostinato.engine.thread_use import ThreadUse, one_thread
from ostinato.errors import RequestError
from ostinato.graphs.capture.closing import Owner
from ostinato.graphs.policy.graph_memory import GraphMemoryReport
from ostinato.graphs.thread_state import leaving_as_found
from ostinato.graphs.trust.ledger.ledger import Ledger
from ostinato.graphs.trust.shadow.report import VerifyReport
from ostinato.loading.encoders.task import find_task
from ostinato.options import described, same_options_as, user_call
from ostinato.outputs import RequestOutput
from ostinato.pooling.calls import PoolingCalls
from ostinato.progress import ProgressBar
from ostinato.report.collect import collect_report
from ostinato.report.records import RunReport
from ostinato.sampling_params import SamplingParams
from ostinato.scheduling.draft_steps import SpeculationStats
from ostinato.text.chat import Message, list_conversations
from ostinato.text.chat_options import ChatOptions
from ostinato.text.prompts import Prompt, list_adapters, list_params, list_prompts

if TYPE_CHECKING:
    from ostinato.pooling.engine import PoolingEngine

_BAR_AFTER_SECONDS = 2.0  # a bar for a shorter call would only flicker


class LLM(LifecycleCalls, PoolingCalls, Owner):
    """A language model, ready to generate, embed or classify; graphs are captured in advance.

    Use it in ``with``, or ``close()`` it, to free the memory. Only one thread at a time may use it:
    while one is in a call or has a stream open, others get ``ConcurrentUseError``.

    It runs on ``tensor_parallel_size`` x ``ulysses_sequence_parallel_size`` ranks, one GPU each, or
    processes on the CPU, and on as many again for each further replica (``data_parallel_size``). In
    a plain process it starts the other ranks itself. Under ``torchrun``
    every rank runs the script and makes the same calls, and every rank gets the results. There the
    number of ranks must match, and the network between them must be trusted: messages are neither
    encrypted nor signed.

    If a rank dies or hangs, the others end with an error that names it, within ``rank_timeout_s``
    and a tenth of it; a process that cannot be interrupted while it waits for that rank ends up to
    a quarter of that time later. A rank counts as hung if it makes no progress in a step for
    ``rank_timeout_s`` while others wait for it, even if it is only slow (this may happen from seven
    tenths of that time on). If all ranks are slow together, none counts as hung. Under ``torchrun``
    the time until a rank joins a call that rank 0 has begun counts too. Rank 0 may take any time
    between calls, and loading and capturing may take any time on any rank.
    """

    @same_options_as(EngineConfig)
    def __init__(self, *args: Any, **options: Any) -> None:
        self.config = EngineConfig(*args, **options)
        self._running = running = _start(self.config)
        self._prompts: PromptReader | None = None
        if isinstance(running, Engine):
            self._prompts = PromptReader(running.tokenizer, running.images, running.max_model_len)

    @classmethod
    def from_config(cls, config: EngineConfig) -> LLM:
        """Build an LLM from an existing configuration."""
        return cls(**{field.name: getattr(config, field.name) for field in fields(config)})

    @property
    def engine(self) -> Engine:
        """The engine of a model that generates; raises for any other model."""
        if isinstance(self._running, Engine):
            return self._running
        raise self._not_to_generate()

    def _not_to_generate(self) -> RequestError:
        assert not isinstance(self._running, Engine)
        return RequestError(
            f"this model was loaded to {self._running.task}, not to generate; if it can do that, "
            "load it with LLM(..., task='generate')"
        )

    @property
    def pooling(self) -> PoolingEngine:
        """The engine of a model that embeds or classifies; raises for one that generates."""
        if not isinstance(self._running, Engine):
            return self._running
        raise RequestError(
            "this model was loaded to generate; to embed or classify with it, load it with "
            "LLM(..., task='embed') or task='classify'"
        )

    @property
    def _lifecycle(self) -> EngineLifecycle:
        return self.engine.lifecycle

    @property
    def task(self) -> Literal["generate", "embed", "classify"]:
        """What the model was loaded for."""
        return "generate" if isinstance(self._running, Engine) else self._running.task

    @property
    def max_model_len(self) -> int:
        """Longest sequence: prompt plus output, or the text of a model that embeds."""
        return self._running.max_model_len

    @property
    def max_num_seqs(self) -> int:
        """Most requests in one step, of all replicas together."""
        return self._running.runner.plan.max_num_seqs * self.config.data_parallel_size

    @property
    def model_path(self) -> Path | None:
        """The directory the model was loaded from; None for random weights of a named shape."""
        return self._running.model_path

    @property
    def tokenizer(self) -> Any:
        """transformers' tokenizer of the model; None if it has none."""
        return self._running.tokenizer

    @property
    def use(self) -> ThreadUse:
        """Tracks which thread is in the engine."""
        return self._running.use

    @property
    def speculation(self) -> SpeculationStats:
        """Counts of drafts (``speculative``) on all replicas; under torchrun, on rank 0 only."""
        return self.engine.scheduler.drafts.stats

    @property
    def verification(self) -> VerifyReport:
        """What ``verify`` compared with eager runs, and what differed; under ranks, on rank 0.

        Empty with ``verify="off"``.
        """
        return self._running.runner.verification

    @property
    def graph_memory(self) -> GraphMemoryReport:
        """Memory of the graphs, estimated and taken, and what ``graph_memory`` left out.

        With several ranks, rank 0's.
        """
        return self.engine.runner.graph_memory

    @one_thread()
    def step_shapes(self) -> dict[str, dict[int, int]]:
        """How many steps had each number of tokens, of decode batches and of mixed ones.

        ``ostinato plan graphs --stats`` reads this, as JSON. Under ranks, of rank 0.
        """
        shapes = sorted(self._running.runner.stats.shapes.items())
        return {
            kind: {size: count for (uniform, size), count in shapes if uniform is decodes}
            for kind, decodes in (("decode", True), ("mixed", False))
        }

    @one_thread()
    def expert_load(self, *, reset: bool = False) -> dict[int, list[int]]:
        """How many tokens chose each expert of a mixture, by layer number.

        Counted on the device, inside the graphs, without padding; since start-up, or since the last
        call with ``reset``. Tokens whose keys and values were reused are not computed, so they do
        not count. On several ranks, of all of them and of all replicas together. Empty for models
        without experts on the native decoder.
        """
        return self.engine.expert_load(reset=reset)

    # --- generating ----------------------------------------------------------------------------

    @user_call(other_engines.CALL_OPTIONS)
    @one_thread()
    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        adapter: str | Sequence[str | None] | None = None,
        use_tqdm: bool | None = None,
    ) -> list[RequestOutput]:
        """Complete all prompts, and return the results in the order of the prompts.

        A prompt is text or token ids: a list, or a 1-D NumPy array or tensor of integers on any
        device. For several prompts, pass a list of these, or a 2-D array or tensor with one prompt
        per row; rows have no padding, so every element is a token.

        A model that takes images takes {"prompt": text, "images": [...]}, or "prompt_token_ids",
        with one placeholder in the prompt for each image: a ``PIL.Image``, an array or tensor of
        uint8 pixels [height, width, 3], or a data URL.

        ``sampling_params``: one for all prompts, or a list with one per prompt; None: the defaults.
        ``adapter``: the name of a loaded LoRA adapter, for all prompts, or a list with a name or
        None per prompt. ``use_tqdm``: show a progress bar for long calls (None: as in
        ``show_progress``).
        """
        prepared = self._prepare(list_prompts(prompts), sampling_params, adapter)
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
                            continue  # a token of a watched request
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

    @user_call(other_engines.CALL_OPTIONS)
    @one_thread()
    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        adapter: str | Sequence[str | None] | None = None,
    ) -> TextStream:
        """Complete all prompts and yield the text of each step. Leaving the loop aborts the rest.

        Inside the loop this thread may generate too; other threads get ``ConcurrentUseError`` until
        it ends. ``prompts``, ``sampling_params`` and ``adapter`` are as in ``generate``.
        """
        _, requests = self._prepare(  # not at the first next()
            list_prompts(prompts), sampling_params, adapter
        )
        return TextStream(self.engine, requests)

    @user_call(other_engines.CALL_OPTIONS)
    @one_thread()
    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        adapter: str | Sequence[str | None] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        use_tqdm: bool | None = None,
    ) -> list[RequestOutput]:
        """Answer one or several conversations, each a list of {"role": ..., "content": ...}.

        The content is text, or a list of text parts, which are joined as lines. For a model that
        takes images, parts may be images: {"type": "image", "image": ...}, as in ``generate``, or
        {"type": "image_url", "image_url": {"url": "data:..."}}.

        For all conversations, ``tools``: those that the model's chat template tells it about, in
        OpenAI's form; calls of them are in the text of the answer. ``chat_template_kwargs``:
        variables of the template, such as {"enable_thinking": False} for Qwen3; a name that it does
        not read is refused. ``sampling_params``, ``adapter`` and ``use_tqdm`` are as in
        ``generate``.
        """
        options = ChatOptions(tools=tools, chat_template_kwargs=chat_template_kwargs)
        reader = self._reader
        conversations = list_conversations(messages)
        prompts = [(name, reader.conversation(name, each, options)) for name, each in conversations]
        prepared = self._prepare(prompts, sampling_params, adapter)
        return self._generate(*prepared, use_tqdm=use_tqdm)

    @one_thread()
    def render_chat(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """The token ids of a conversation, up to the start of the answer.

        Each image is one placeholder. ``tools`` and ``chat_template_kwargs`` are as in ``chat``.
        """
        options = ChatOptions(tools=tools, chat_template_kwargs=chat_template_kwargs)
        return self._reader.render("messages", messages, options)[0]

    # --- adapters ------------------------------------------------------------------------------

    @one_thread()
    def load_adapter(self, name: str, path: str | Path) -> None:
        """Load the LoRA adapter in the directory ``path``, in PEFT's format, under this name.

        Needs ``enable_lora``. An adapter of the same name is replaced: unfinished requests keep the
        old one until they end, and its slot too. If this raises, nothing has changed.
        """
        self.engine.load_adapter(name, path)

    @one_thread()
    def unload_adapter(self, name: str) -> None:
        """Forget an adapter. Unfinished requests keep it until they end, and its slot too."""
        self.engine.unload_adapter(name)

    @property
    def adapters(self) -> list[str]:
        """The names of the loaded adapters."""
        return self.engine.adapters.names

    # --- what the graphs did -------------------------------------------------------------------

    @one_thread()
    def ledger(self) -> Ledger:
        """Which memory the captured graphs hold, whose it is, and whether it is still there.

        Of several ranks, those of this process. ``update_weights``, ``load_adapter``, ``wake``,
        ``clear_graphs`` and ``capture_graphs`` check it themselves: they raise ``StaleGraphError``
        if memory that a graph holds has moved.
        """
        return self._running.runner.ledger

    @one_thread()
    def report(self) -> RunReport:
        """What the graphs did so far: plan, time, padding, eager steps, memory, and their nodes.

        ``write_report`` keeps it in a file, ``report_page`` turns it into a page. Reads the nodes
        of all graphs, which takes up to a few seconds. With several ranks, it covers
        this one only.
        """
        return collect_report(self._running)

    # --- requests ------------------------------------------------------------------------------

    def _prepare(
        self,
        prompts: list[tuple[str, Any]],
        params: SamplingParams | Sequence[SamplingParams] | None,
        adapter: str | Sequence[str | None] | None,
    ) -> tuple[list[RequestOutput], list[CheckedRequest]]:
        """Check all requests before any runs. Prompts come with their names in errors."""
        each_params = list_params(params, len(prompts))
        adapters = list_adapters(adapter, len(prompts))
        outputs: list[RequestOutput] = []
        requests: list[CheckedRequest] = []
        for (name, prompt), its_params, adapter in zip(prompts, each_params, adapters, strict=True):
            read = self._reader.read(name, prompt)
            request = self.engine.check_request(
                read.token_ids, its_params, name=name, adapter=adapter, images=read.images
            )
            requests.append(request)
            outputs.append(
                RequestOutput(
                    request_id=request.request_id,
                    prompt=read.text,
                    prompt_token_ids=request.prompt_token_ids,
                    outputs=[],
                )
            )
        return outputs, requests

    @property
    def _reader(self) -> PromptReader:
        if self._prompts is None:
            raise self._not_to_generate()
        return self._prompts

    # --- ownership -----------------------------------------------------------------------------

    def close(self) -> None:
        """Free the graphs, the KV cache and the weights. Closing twice is harmless.

        Everything is freed even if one part raises, and even when memory has run out.
        """
        self._running.runner.pool.free_spare()
        self._close()

    @one_thread("LLM.close")
    def _close(self) -> None:
        try:
            self._running.close()
        finally:
            if self._prompts is not None:
                self._prompts.close()

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise TypeError(
            "an LLM cannot be copied or pickled: it owns graphs and the memory they point to; "
            "build another one with LLM.from_config(llm.config)"
        )


@leaving_as_found
def _start(config: EngineConfig) -> Engine | PoolingEngine:
    """The engine for the model's task."""
    task = config.task
    if task == "auto":
        task = find_task(
            None if config.model is None else str(config.model),
            random_weights=config.random_weights,
            show_progress=config.show_progress,
        )
    if task == "generate":
        if config.data_parallel_size == 1:
            return Engine(config)
        from ostinato.engine.replica_engine import ReplicaEngine  # needs torch.distributed

        return ReplicaEngine(config)
    from ostinato.pooling.engine import PoolingEngine  # transformers' modules take long to import

    return PoolingEngine(config, task)


def _bar(total: int) -> Any:
    return ProgressBar(total=total, desc="generating", delay=_BAR_AFTER_SECONDS)


LLM.__doc__ = f"{inspect.cleandoc(LLM.__doc__ or '')}\n\n{described(list(fields(EngineConfig)))}"
