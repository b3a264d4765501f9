"""Runs two engines at once, on two streams and two threads; each request must match a solo run.

Requests are drawn from a set of distinct ones. First a third engine answers each of these alone.
Then two engines serve them together: in random order, with shared prefixes, aborts, and a KV cache
so small that requests are preempted. At the end the first engine answers some of them alone again.
Tokens, finish reasons and log-probabilities are compared with the solo run; an aborted request must
be a prefix of it, and every block must be free in the end. Uses float32, because half precision
rounds differently in batches of another size.

With ``--adapters``, requests have LoRA adapters, more than fit at once, which are loaded, replaced
and unloaded all the while. With ``--speculative``, the two engines draft tokens, and the third does
not. With ``--images``, the model is a checkpoint that takes images. All of them go together.

    PYTHONPATH=src python benchmarks/soak.py --output result.json
    PYTHONPATH=src python benchmarks/soak.py --device cpu --requests 200
    PYTHONPATH=src python benchmarks/soak.py --adapters 5 --speculative suffix
    PYTHONPATH=src python benchmarks/soak.py --model DIRECTORY --checkpoint --images \\
        --adapters 5 --speculative suffix

Exits with 1 if anything differs, or if nothing was aborted, preempted or reused, or accepted.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from ostinato import GraphConfig, SamplingParams
from ostinato.config import EngineConfig
from ostinato.engine.engine import Engine
from ostinato.engine.requests.completion import Completion
from ostinato.errors import ConfigError

MAX_MODEL_LEN = 192
MAX_PROMPT = 96
MAX_NEW_TOKENS = 48
LOGPROB_TOLERANCE = 1e-3  # float32, a few layers, other batch sizes
SHOWN_DIFFERENCES = 20
MAX_LORAS = 2
LORA_RANK = 4
NUM_PICTURES = 12


@dataclass(frozen=True)
class Question:
    """One distinct request."""

    prompt: list[int]
    params: SamplingParams
    adapter: str | None = None
    images: tuple[Any, ...] = ()


@dataclass(frozen=True)
class Answer:
    """The result of one sequence of a request."""

    tokens: list[int]
    reason: str | None
    stop_reason: int | str | None
    logprobs: list[float] | None

    @staticmethod
    def of(completion: Completion) -> Answer:
        output = completion.output
        logprobs = None
        if output.logprobs is not None:
            pairs = zip(output.logprobs, output.token_ids, strict=True)
            logprobs = [row[token].logprob for row, token in pairs]
        return Answer(list(output.token_ids), output.finish_reason, output.stop_reason, logprobs)


@dataclass
class Tally:
    """Counts of one engine's thread, and the differences found."""

    requests: int = 0
    sequences: int = 0
    tokens: int = 0
    aborted: int = 0
    preemptions: int = 0
    prefix_hits: int = 0
    steps: int = 0
    adapters_loaded: int = 0
    drafts_accepted: int = 0
    with_images: int = 0
    differences: int = 0
    shown: list[dict[str, Any]] = field(default_factory=list)
    error: BaseException | None = None


# --- what is asked --------------------------------------------------------------------------------


def draw_params(source: random.Random, vocab_size: int) -> SamplingParams:
    """Any mixture of sampler features. Everything random has a seed."""
    options: dict[str, Any] = {"max_tokens": source.randint(1, MAX_NEW_TOKENS), "ignore_eos": True}
    if source.random() < 0.6:
        options["temperature"] = source.choice([0.3, 0.7, 1.0, 1.5])
        options["seed"] = source.randrange(2**63)
        for name, choices in (
            ("top_k", [1, 5, 40]),
            ("top_p", [0.3, 0.8, 0.95]),
            ("min_p", [0.02, 0.2]),
        ):
            if source.random() < 0.3:
                options[name] = source.choice(choices)
    else:
        options["temperature"] = 0.0
    for name, choices in (
        ("presence_penalty", [-0.5, 0.7]),
        ("frequency_penalty", [-0.3, 0.9]),
        ("repetition_penalty", [0.8, 1.3]),
        ("logprobs", [0, 3]),
        ("min_tokens", [1, options["max_tokens"]]),
        ("n", [2]),
    ):
        if source.random() < 0.15:
            options[name] = source.choice(choices)
    if source.random() < 0.2:
        options["logit_bias"] = {source.randrange(vocab_size): source.choice([-100.0, 2.0, 9.0])}
    if source.random() < 0.3:
        options["stop_token_ids"] = source.sample(range(vocab_size), min(40, vocab_size // 4))
    return SamplingParams(**options)


def draw_questions(
    source: random.Random, count: int, engine: Engine, adapters: Sequence[str]
) -> list[Question]:
    """Distinct requests; half of the prompts share a prefix with others."""
    vocab_size, config = engine.model.vocab_size, engine.model_config
    of_images = [getattr(config, name, None) for name in _PLACEHOLDERS]
    words = [token for token in range(vocab_size) if token not in of_images]
    pictures = [draw_picture(source) for _ in range(NUM_PICTURES)]

    def tokens(most: int) -> list[int]:
        return [source.choice(words) for _ in range(source.randint(1, most))]

    prefixes = [tokens(MAX_PROMPT // 2) for _ in range(max(1, count // 20))]
    questions = []
    for _ in range(count):
        shared = source.choice(prefixes) if source.random() < 0.5 else []
        prompt, images = shared + tokens(MAX_PROMPT - len(shared)), []
        if engine.images.are_taken and source.random() < 0.5:
            images = source.choices(pictures, k=source.randint(1, 2))
            at = source.randint(0, len(prompt) - 1)
            # vision_start, image, vision_end of each
            prompt[at:at] = [t for _ in images for t in of_images[:3] if t is not None]
        params = draw_params(source, vocab_size)
        adapter = source.choice([None, *adapters])
        questions.append(Question(prompt, params, adapter, tuple(images)))
    return questions


_PLACEHOLDERS = ("vision_start_token_id", "image_token_id", "vision_end_token_id", "video_token_id")


def draw_picture(source: random.Random) -> Any:
    """Random pixels; two in three pictures have one of two common sizes."""
    size = source.choice([(16, 24), (32, 32), (source.randint(8, 48), source.randint(8, 48))])
    pixels = np.random.default_rng(source.randrange(2**32)).integers(0, 256, (*size, 3))
    return pixels.astype(np.uint8)


# --- adapters -------------------------------------------------------------------------------------


def write_adapters(directory: Path, engine: Engine, count: int) -> dict[str, Path]:
    """Random adapters of all of a layer's linears, by name."""
    config, layers = engine.model_config, "model.layers"
    if engine.images.are_taken:
        config, layers = config.get_text_config(), "model.language_model.layers"
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    hidden, inner = config.hidden_size, config.intermediate_size
    queries, keys = (
        heads * head_dim for heads in (config.num_attention_heads, config.num_key_value_heads)
    )
    shapes = {  # inputs, outputs
        "self_attn.q_proj": (hidden, queries),
        "self_attn.k_proj": (hidden, keys),
        "self_attn.v_proj": (hidden, keys),
        "self_attn.o_proj": (queries, hidden),
        "mlp.gate_proj": (hidden, inner),
        "mlp.up_proj": (hidden, inner),
        "mlp.down_proj": (inner, hidden),
    }
    paths = {}
    for number in range(count):
        torch.manual_seed(number)
        tensors = {}
        for layer in range(config.num_hidden_layers):
            for name, (inputs, outputs) in shapes.items():
                prefix = f"base_model.model.{layers}.{layer}.{name}"
                tensors[f"{prefix}.lora_A.weight"] = torch.randn(LORA_RANK, inputs) * inputs**-0.5
                tensors[f"{prefix}.lora_B.weight"] = torch.randn(outputs, LORA_RANK) * 0.3
        path = paths[f"adapter-{number}"] = directory / f"adapter-{number}"
        path.mkdir()
        save_file(tensors, path / "adapter_model.safetensors")
        targets = sorted(name.rpartition(".")[2] for name in shapes)
        settings = {"peft_type": "LORA", "r": LORA_RANK, "lora_alpha": 8, "target_modules": targets}
        (path / "adapter_config.json").write_text(json.dumps(settings))
    return paths


class Shelf:
    """The adapters of an engine, of which ``MAX_LORAS`` are loaded at a time."""

    def __init__(self, engine: Engine, paths: dict[str, Path], seed: int) -> None:
        self.num_loaded = 0
        self._engine = engine
        self._paths = paths
        self._source = random.Random(seed)
        self._loaded: list[str] = []
        self._leaving: str | None = None  # gets no more requests, so that another finds a place

    def fetch(self, name: str | None, in_use: Sequence[str | None] = ()) -> bool:
        """Load an adapter, in the place of one that no request uses; False if there is none."""
        if name is None:
            return True
        if name in self._loaded:
            if self._source.random() < 0.05:
                self._replace(name, in_use)
            if name == self._leaving and name not in in_use:
                self._leaving = None  # no other has asked for its place
            return name != self._leaving
        if len(self._loaded) == MAX_LORAS:
            idle = [each for each in self._loaded if each not in in_use]
            if not idle:
                self._leaving = self._leaving or self._source.choice(self._loaded)
                return False
            gone = self._leaving if self._leaving in idle else self._source.choice(idle)
            self._engine.unload_adapter(gone)
            self._loaded.remove(gone)
            self._leaving = None
        self._load(name)
        return True

    def _replace(self, name: str, in_use: Sequence[str | None]) -> None:
        """Load it again. While requests use it, that takes a slot more, which there may not be."""
        if name in in_use and len(self._loaded) == MAX_LORAS:
            try:
                self._load(name)
            except ConfigError:
                return
            raise RuntimeError(f"{name} was replaced without a slot for its requests")
        self._load(name)

    def _load(self, name: str) -> None:
        self._engine.load_adapter(name, self._paths[name])
        self.num_loaded += 1
        if name not in self._loaded:
            self._loaded.append(name)


# --- one engine -----------------------------------------------------------------------------------


def open_engine(args: argparse.Namespace, **changed: Any) -> Engine:
    options: dict[str, Any] = {
        "model": args.model,
        "random_weights": args.random_weights,
        "device": args.device,
        "dtype": "float32",
        "max_num_seqs": args.max_num_seqs,
        "max_num_batched_tokens": 256,
        "max_model_len": MAX_MODEL_LEN,
        "long_prefill_token_threshold": 64,
        "block_size": 8,
        "kv_cache_memory_bytes": args.kv_cache_memory_bytes,
        "graphs": GraphConfig(capture_sizes=[1, 2, 4, 8, 16, 32, 64, 128]),
        "async_scheduling": True,
        "show_progress": False,
    }
    if args.adapters:
        options |= {"enable_lora": True, "max_loras": MAX_LORAS, "max_lora_rank": LORA_RANK}
    return Engine(EngineConfig(**{**options, **changed}))


def completions_of(engine: Engine, question: Question) -> list[Completion]:
    prompt, images = engine.images.place("the prompt", question.prompt, question.images)
    request = engine.check_request(prompt, question.params, adapter=question.adapter, images=images)
    return [request.completion(index) for index in range(question.params.n)]


def answer_alone(engine: Engine, question: Question, shelf: Shelf) -> list[Answer]:
    """Each sequence of one request, with nothing else in the engine."""
    answers = []
    shelf.fetch(question.adapter)
    for completion in completions_of(engine, question):
        engine.add(completion)
        while not completion.finished:
            engine.step()
        answers.append(Answer.of(completion))
    return answers


class Crowd:
    """One engine whose queue stays filled until all its requests are served."""

    def __init__(
        self,
        engine: Engine,
        questions: Sequence[Question],
        expected: Sequence[Sequence[Answer]],
        numbers: Sequence[int],
        shelf: Shelf,
        seed: int,
    ) -> None:
        self.tally = Tally()
        self.shelf = shelf
        self._engine = engine
        self._questions = questions
        self._expected = expected
        self._queue = deque(numbers)
        self._source = random.Random(seed)
        self._most = 2 * engine.runner.plan.max_num_seqs
        # By identity of the completion: the completion, its question's number, steps left or None.
        self._running: dict[int, list[Any]] = {}

    def run(self, stream: AbstractContextManager[Any]) -> None:
        """Serve all requests. An error goes into the tally, for the main thread."""
        try:
            with stream:
                while self._queue or self._running:
                    self._admit()
                    self._abort_some()
                    self.tally.steps += 1
                    for completion in self._engine.step():
                        self._finish(completion, aborted=False)
                while self._engine.has_unfinished:  # steps of aborted requests
                    self._engine.step()
                self._check_blocks()
            self.tally.adapters_loaded = self.shelf.num_loaded
            self.tally.drafts_accepted = self._engine.scheduler.drafts.stats.num_accepted
        except BaseException as error:
            self.tally.error = error

    def _check_blocks(self) -> None:
        allocator = self._engine.scheduler.allocator
        held = allocator.num_blocks - 1 - allocator.num_free_blocks  # block 0 is for padding
        if held:
            raise RuntimeError(f"{held} blocks are held after the last request")

    def _admit(self) -> None:
        misses = 0
        while self._queue and len(self._running) < self._most:
            number = self._queue[0]
            question = self._questions[number]
            in_use = [self._questions[entry[1]].adapter for entry in self._running.values()]
            if not self.shelf.fetch(question.adapter, in_use):
                self._queue.rotate(-1)  # others go first, until its adapter finds a place
                misses += 1
                if misses >= len(self._queue):
                    return
                continue
            self._queue.popleft()
            patience = self._source.randint(0, 60) if self._source.random() < 0.15 else None
            for completion in completions_of(self._engine, question):
                self._engine.add(completion)
                self._running[id(completion)] = [completion, number, patience]
            self.tally.requests += 1
            self.tally.with_images += bool(question.images)

    def _abort_some(self) -> None:
        for entry in list(self._running.values()):
            completion, _, patience = entry
            if patience is None:
                continue
            if patience == 0:
                self._engine.abort(completion)
                self._finish(completion, aborted=True)
            entry[2] -= 1

    def _finish(self, completion: Completion, *, aborted: bool) -> None:
        _, number, _ = self._running.pop(id(completion))
        tally, request = self.tally, completion.request
        tally.sequences += 1
        tally.tokens += len(completion.output.token_ids)
        tally.aborted += aborted
        tally.preemptions += request.num_preemptions
        tally.prefix_hits += request.num_cached_tokens > 0
        wanted = self._expected[number][completion.output.index]
        compare(tally, number, Answer.of(completion), wanted, aborted=aborted)


def compare(tally: Tally, number: int, got: Answer, wanted: Answer, *, aborted: bool) -> None:
    """Count a difference, and keep the first few."""
    count = len(got.tokens)
    same = got.tokens == wanted.tokens[:count]
    if not aborted:
        same = same and count == len(wanted.tokens)
        same = same and (got.reason, got.stop_reason) == (wanted.reason, wanted.stop_reason)
    if got.logprobs is not None and wanted.logprobs is not None:
        pairs = zip(got.logprobs, wanted.logprobs[:count], strict=False)
        same = same and all(abs(a - b) <= LOGPROB_TOLERANCE for a, b in pairs)
    if not same:
        tally.differences += 1
        if len(tally.shown) < SHOWN_DIFFERENCES:
            about = {"question": number, "aborted": aborted}
            tally.shown.append({**about, "got": asdict(got), "alone": asdict(wanted)})


# --- the whole ------------------------------------------------------------------------------------


def say(text: str, started: float) -> None:
    print(f"{time.perf_counter() - started:7.1f} s  {text}", flush=True)


def soak(args: argparse.Namespace, directory: Path) -> dict[str, Any]:
    """Run everything; return the findings. Adapters are written to ``directory``."""
    started = time.perf_counter()
    source = random.Random(args.seed)
    with open_engine(args) as alone:
        device = alone.model.device
        paths = write_adapters(directory, alone, args.adapters) if args.adapters else {}
        questions = draw_questions(source, args.distinct, alone, list(paths))
        say(f"{len(questions)} distinct requests, each alone first", started)
        shelf = Shelf(alone, paths, args.seed)
        expected = [answer_alone(alone, question, shelf) for question in questions]
    say(f"{sum(len(a.tokens) for row in expected for a in row)} tokens alone", started)
    # Another block size and other graphs, so that the engines' steps differ.
    graphs = GraphConfig(mode="FULL", capture_sizes=[4, 24, 96])
    drafts = {"speculative": args.speculative}
    with (
        open_engine(args, **drafts) as first,
        open_engine(args, block_size=16, graphs=graphs, **drafts) as second,
    ):
        numbers = [source.randrange(len(questions)) for _ in range(args.requests)]
        crowds = [
            Crowd(
                engine,
                questions,
                expected,
                numbers[index::2],
                Shelf(engine, paths, args.seed + index),
                args.seed + index,
            )
            for index, engine in enumerate((first, second))
        ]
        run_at_once(crowds, device, args.requests, started)
        again = Tally()
        for number in source.sample(range(len(questions)), min(50, len(questions))):
            again.requests += 1
            answers = answer_alone(first, questions[number], crowds[0].shelf)
            for got, wanted in zip(answers, expected[number], strict=True):
                compare(again, number, got, wanted, aborted=False)
        say(f"{again.requests} requests alone again: {again.differences} differ", started)
    return report(args, device, [*(crowd.tally for crowd in crowds), again], started)


def run_at_once(crowds: list[Crowd], device: torch.device, total: int, started: float) -> None:
    """Run each crowd in its own thread, and on its own stream if there are streams."""
    threads = []
    for crowd in crowds:
        stream: Any = nullcontext()
        if device.type == "cuda":
            stream = torch.cuda.stream(torch.cuda.Stream(device))
        threads.append(threading.Thread(target=crowd.run, args=(stream,), daemon=True))
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        for thread in threads:
            thread.join(timeout=5.0)
        tallies = [crowd.tally for crowd in crowds]
        served, differ = (sum(getattr(t, n) for t in tallies) for n in ("requests", "differences"))
        say(f"{served} of {total} requests taken in, {differ} sequences differ", started)
    for crowd in crowds:
        if crowd.tally.error is not None:
            raise crowd.tally.error


def report(
    args: argparse.Namespace, device: torch.device, tallies: list[Tally], started: float
) -> dict[str, Any]:
    counted = (
        *("requests", "sequences", "tokens", "aborted", "preemptions", "prefix_hits", "steps"),
        *("adapters_loaded", "drafts_accepted", "with_images"),
    )
    counts = {name: sum(getattr(tally, name) for tally in tallies[:2]) for name in counted}
    cuda = device.type == "cuda"
    return {
        "command": " ".join(["python", *sys.argv]),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": torch.cuda.get_device_name(device) if cuda else "cpu",
        "torch": torch.__version__,
        "model": args.model,
        "dtype": "float32",
        "distinct": args.distinct,
        "seconds": round(time.perf_counter() - started, 1),
        **counts,
        "alone_again": tallies[2].requests,
        "differences": sum(tally.differences for tally in tallies),
        "first_differences": [one for tally in tallies for one in tally.shown],
    }


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Two engines at once against each request alone.")
    parser.add_argument("--requests", type=int, default=20_000, help="for both engines together")
    parser.add_argument("--distinct", type=int, help="distinct requests (default: 1,500 at most)")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--model", default="tiny", help="a shape, or a checkpoint's directory")
    parser.add_argument("--checkpoint", action="store_true", help="the model is a checkpoint")
    parser.add_argument("--adapters", type=int, default=0, help="distinct LoRA adapters")
    parser.add_argument("--speculative", choices=["ngram", "suffix"], help="where drafts come from")
    parser.add_argument("--images", action="store_true", help="the model takes images")
    parser.add_argument("--max-num-seqs", type=int, default=32)
    parser.add_argument(
        "--kv-cache-memory-bytes", default="640K", help="small, so that some must wait"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, help="where to write the result as JSON")
    args = parser.parse_args(argv)
    if args.requests < 2:
        parser.error(f"--requests must be 2 or more, got {args.requests}")
    if args.distinct is None:
        args.distinct = min(1_500, max(1, args.requests // 5))
    args.random_weights = not args.checkpoint
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    with tempfile.TemporaryDirectory() as directory:
        result = soak(args, Path(directory))
    if args.output is not None:
        args.output.write_text(json.dumps(result, indent=2) + "\n")
    shown = {name: value for name, value in result.items() if name != "first_differences"}
    print(json.dumps(shown, indent=2))
    wanted = ["aborted", "preemptions", "prefix_hits"]
    wanted += ["adapters_loaded"] if args.adapters else []
    wanted += ["drafts_accepted"] if args.speculative else []
    wanted += ["with_images"] if args.images else []
    idle = [name for name in wanted if not result[name]]
    if idle:
        print(f"nothing was tested of: {', '.join(idle)}; ask for more requests")
    for difference in result["first_differences"]:
        print("different:", json.dumps(difference))
    return 1 if result["differences"] or idle else 0


if __name__ == "__main__":
    sys.exit(main())
