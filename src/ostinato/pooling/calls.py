"""``PoolingCalls``: the calls of an ``LLM`` whose model reads a text once, with their help."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from ostinato import other_engines
from ostinato.engine.thread_use import ThreadUse, one_thread
from ostinato.options import user_call
from ostinato.outputs import ClassificationOutput, EmbeddingOutput, ScoreOutput
from ostinato.text.prompts import Prompt

if TYPE_CHECKING:
    from ostinato.pooling.engine import PoolingEngine  # transformers' modules take long to import


class PoolingCalls:
    """Embeddings, scores and classes of a model that does not generate."""

    @property
    @abstractmethod
    def use(self) -> ThreadUse:
        """Tracks which thread is in the engine."""

    @property
    @abstractmethod
    def pooling(self) -> PoolingEngine:
        """The engine of a model that embeds or classifies; raises for one that generates."""

    @user_call(other_engines.CALL_OPTIONS, called="LLM.embed")
    @one_thread("LLM.embed")
    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        pooling: Literal["auto", "cls", "last", "mean"] = "auto",
        normalize: bool = True,
        dimensions: int | None = None,
        truncate: bool = False,
        use_tqdm: bool | None = None,
    ) -> list[EmbeddingOutput]:
        """Embed all prompts, and return the embeddings in the order of the prompts.

        ``prompts``: as in ``generate``. ``pooling``: which token's state is the embedding: the
        first (cls), the last, or the mean of all; auto: as the checkpoint says, else the last for
        causal models and the mean for others. ``normalize``: to length 1. ``dimensions``: keep only
        this many, before normalising, for models trained for it. ``truncate``: cut prompts that are
        too long, instead of raising. ``use_tqdm``: as in ``generate``.
        """
        return self.pooling.embed(
            prompts,
            pooling=pooling,
            normalize=normalize,
            dimensions=dimensions,
            truncate=truncate,
            use_tqdm=use_tqdm,
        )

    @user_call(other_engines.CALL_OPTIONS, called="LLM.score")
    @one_thread("LLM.score")
    def score(
        self,
        query: Prompt | Sequence[Prompt],
        documents: Prompt | Sequence[Prompt],
        *,
        truncate: bool = False,
        use_tqdm: bool | None = None,
    ) -> list[ScoreOutput]:
        """How well each document matches the query, in the order of the documents.

        ``query``: one for all documents, or a list with one for each. A cross-encoder (a classifier
        with one label) reads both as one sequence; of a model that embeds, it is the cosine of the
        angle between their embeddings. ``truncate``, ``use_tqdm``: as in ``embed``.
        """
        return self.pooling.score(query, documents, truncate=truncate, use_tqdm=use_tqdm)

    @user_call(other_engines.CALL_OPTIONS, called="LLM.classify")
    @one_thread("LLM.classify")
    def classify(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        truncate: bool = False,
        use_tqdm: bool | None = None,
    ) -> list[ClassificationOutput]:
        """The probabilities of the model's labels for each prompt, in the order of the prompts.

        ``prompts``: as in ``generate``. ``truncate``, ``use_tqdm``: as in ``embed``.
        """
        return self.pooling.classify(prompts, truncate=truncate, use_tqdm=use_tqdm)
