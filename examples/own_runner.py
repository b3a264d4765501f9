"""A model runner of your own: plan, dispatcher, manager and wrapper around a plain PyTorch model.

The decoder below keeps its keys and values in a cache and knows nothing about graphs, except that
its attention is an eager break and reads the batch from the forward context. The runner gives it
FULL graphs for decode batches and PIECEWISE graphs, broken at attention, for all others, and prints
how each batch ran and why.

    python examples/own_runner.py
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from ostinato import (
    AttentionCGSupport,
    BatchShape,
    CapturePlan,
    CudaGraphManager,
    CUDAGraphMode,
    CUDAGraphWrapper,
    GraphPool,
    PlanEntry,
    PreparedBatch,
    compilation_counter,
    eager_break,
    get_forward_context,
    resolve_mode,
    set_forward_context,
)

VOCAB, WIDTH, HEADS, LAYERS = 100, 32, 4, 3
MAX_SEQS, MAX_LEN, MAX_TOKENS = 4, 32, 24
SIZES = [1, 2, 4, 8, 16]
PROMPTS = [[11, 12, 13, 14, 15], [21, 22], [31, 32, 33, 34, 35, 36]]
LENGTHS = [9, 5, 12]  # final length of each sequence, including the prompt


# --- the model -----------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class BatchMetadata:
    """One batch as attention sees it. The tensors are static buffers, cut to the padded size.

    ``query_lens``, the tokens of each request, is for the host. None means one token per request,
    and then attention does not need the host.
    """

    rows: torch.Tensor  # [tokens] the cache row of each token's request; padding has a row too
    positions: torch.Tensor  # [tokens]
    caches: Sequence[tuple[torch.Tensor, torch.Tensor]]  # per layer: [rows, MAX_LEN, heads, dim]
    query_lens: list[int] | None


@eager_break
def attention(
    layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor
) -> None:
    """Store keys and values, attend, write ``out``; all are [tokens, heads, dim]."""
    batch: BatchMetadata = get_forward_context().attn_metadata
    keys, values = batch.caches[layer]
    keys[batch.rows, batch.positions] = k
    values[batch.rows, batch.positions] = v
    if batch.query_lens is None:  # fixed shapes: a graph can hold this
        keys, values = (cache[batch.rows].transpose(1, 2) for cache in (keys, values))
        visible = torch.arange(MAX_LEN, device=q.device) <= batch.positions[:, None]
        mask = visible[:, None, None, :]
        out.copy_(F.scaled_dot_product_attention(q[:, :, None], keys, values, mask)[:, :, 0])
        return
    start = 0
    for query_len in batch.query_lens:  # depends on the batch: a graph cannot hold this
        end = start + query_len
        row, first = int(batch.rows[start]), int(batch.positions[start])
        seen = first + query_len
        mask = torch.ones(query_len, seen, dtype=torch.bool, device=q.device).tril(first)
        parts = (q[start:end], keys[row, :seen], values[row, :seen])
        by_head = (part.transpose(0, 1) for part in parts)
        out[start:end] = F.scaled_dot_product_attention(*by_head, mask).transpose(0, 1)
        start = end
    out[start:].zero_()  # padding


class Layer(nn.Module):
    def __init__(self, index: int) -> None:
        super().__init__()
        self.index = index
        self.norm1, self.norm2 = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm1(x)).view(len(x), 3, HEADS, WIDTH // HEADS).unbind(1)
        attended = torch.empty_like(q)
        attention(self.index, q, k, v, attended)  # in place: the next segment reads it there
        x = x + self.out(attended.view(len(x), WIDTH))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCAB, WIDTH), nn.Embedding(MAX_LEN, WIDTH)
        self.layers = nn.ModuleList(Layer(index) for index in range(LAYERS))
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, inputs: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """Map token ids and positions, both [tokens], to logits [tokens, VOCAB]."""
        ids, positions = inputs
        x = self.tokens(ids) + self.places(positions)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


# --- the runner ----------------------------------------------------------------------------------


class Runner:
    """Owns all memory that graphs refer to: inputs, caches, outputs."""

    def __init__(self, model: Decoder, device: torch.device, mode: CUDAGraphMode) -> None:
        # 1. What can be captured: attention needs the host unless every request has one token.
        resolved = resolve_mode(
            mode, AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE, piecewise_available=True
        )
        # 2. Which graphs to capture.
        self.plan = CapturePlan.build(
            resolved.mode, SIZES, max_num_seqs=MAX_SEQS, max_num_batched_tokens=MAX_TOKENS
        )
        # 3. Static memory. The cache has one extra row, which padding writes to.
        self.ids = torch.zeros(MAX_TOKENS, dtype=torch.long, device=device)
        self.positions = torch.zeros_like(self.ids)
        self.rows = torch.full_like(self.ids, MAX_SEQS)
        shape = (MAX_SEQS + 1, MAX_LEN, HEADS, WIDTH // HEADS)
        self.caches = [
            (torch.zeros(shape, device=device), torch.zeros(shape, device=device))
            for _ in range(LAYERS)
        ]
        # 4. The wrapper captures pieces when the context says PIECEWISE, and otherwise just calls
        #    the model; the manager captures FULL graphs around it. Both use one pool.
        self.pool = GraphPool(device)
        self.forward = CUDAGraphWrapper(
            model, CUDAGraphMode.PIECEWISE, pool=self.pool, split_at_breaks=True
        )
        self.manager = CudaGraphManager(self.plan, self.pool, show_progress=False)
        self.choices: Counter[tuple[str, str]] = Counter()
        with torch.no_grad():
            self.report = self.manager.capture(self.forward, self.prepare)

    def prepare(self, entry: PlanEntry) -> PreparedBatch[tuple[torch.Tensor, torch.Tensor]]:
        """The inputs for capturing one entry of the plan."""
        size = entry.descriptor.num_tokens
        self.ids.zero_()
        self.positions.zero_()
        self.rows.fill_(MAX_SEQS)
        query_lens = None if entry.descriptor.uniform else [size]
        return PreparedBatch(
            inputs=self.inputs(size), attn_metadata=self.metadata(size, query_lens)
        )

    def inputs(self, size: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.ids[:size], self.positions[:size]

    def metadata(self, size: int, query_lens: list[int] | None) -> BatchMetadata:
        return BatchMetadata(
            rows=self.rows[:size],
            positions=self.positions[:size],
            caches=self.caches,
            query_lens=query_lens,
        )

    @torch.no_grad()
    def step(self, batch: dict[int, tuple[int, list[int]]], *, has_prompts: bool) -> list[int]:
        """Run one batch {row: (tokens before, new tokens)}; the next token of each request."""
        query_lens = [len(new) for _, new in batch.values()]
        num_tokens = sum(query_lens)
        # 5. Dispatch before filling buffers: the choice says how far to pad.
        choice = self.manager.dispatch(
            BatchShape(num_tokens, len(batch), max(query_lens), has_prompts=has_prompts)
        )
        size = choice.padded_num_tokens
        self.fill(batch, size)
        if choice.mode is CUDAGraphMode.FULL:
            logits = self.manager.run_fullgraph(choice.descriptor, num_tokens)
        else:  # PIECEWISE or NONE: the wrapper reads the mode from the context
            metadata = self.metadata(size, query_lens)
            with set_forward_context(choice.mode, choice.descriptor, attn_metadata=metadata):
                logits = self.forward(self.inputs(size))[:num_tokens]
        # 6. Every batch has a reason.
        self.choices[choice.mode.name, choice.reason.value] += 1
        last = torch.tensor(query_lens).cumsum(0) - 1
        return logits[last.to(logits.device)].argmax(-1).tolist()

    def fill(self, batch: dict[int, tuple[int, list[int]]], size: int) -> None:
        ids = [token for _, new in batch.values() for token in new]
        positions = [num + i for num, new in batch.values() for i in range(len(new))]
        rows = [row for row, (_, new) in batch.items() for _ in new]
        padding = size - len(ids)
        for buffer, values, value in (
            (self.ids, ids, 0),
            (self.positions, positions, 0),
            (self.rows, rows, MAX_SEQS),
        ):
            buffer[:size].copy_(torch.tensor(values + [value] * padding))

    def generate(self, prompts: list[list[int]], lengths: list[int]) -> list[list[int]]:
        """Greedy tokens: all prompts in one batch, then a token for every unfinished sequence."""
        sequences = [list(prompt) for prompt in prompts]
        batch = {row: (0, prompt) for row, prompt in enumerate(prompts)}
        has_prompts = True
        while batch:
            for row, token in zip(batch, self.step(batch, has_prompts=has_prompts), strict=True):
                sequences[row].append(token)
            has_prompts = False
            batch = {
                row: (len(tokens) - 1, tokens[-1:])
                for row, tokens in enumerate(sequences)
                if len(tokens) < lengths[row]
            }
        return sequences

    def close(self) -> None:
        self.pool.close()


def build(device: torch.device) -> Decoder:
    torch.manual_seed(0)
    return Decoder().to(device).eval()


def main() -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = build(device)
    tokens = {}
    for mode in (CUDAGraphMode.FULL, CUDAGraphMode.NONE):
        before = compilation_counter.clone()
        runner = Runner(model, device, mode)
        captured = compilation_counter.num_cudagraph_captured - before.num_cudagraph_captured
        print(f"asked for {mode.name}, planned {runner.plan.mode.name}")
        entries, num_bytes = len(runner.plan.entries), runner.report.num_bytes
        print(f"  {entries} entries, {captured} graphs, {num_bytes:,} bytes")
        tokens[mode] = runner.generate(PROMPTS, LENGTHS)
        # More tokens than the largest size: runs eagerly, and says so.
        runner.generate([list(range(12)), list(range(8))], [13, 9])
        for (ran_as, reason), count in runner.choices.items():
            print(f"  {count:2} x {ran_as:9}  {reason}")
        runner.close()
    print("same tokens:", tokens[CUDAGraphMode.FULL] == tokens[CUDAGraphMode.NONE])


if __name__ == "__main__":
    main()
