"""Search by embeddings: a small encoder with random weights, packed batches, PIECEWISE graphs.

python examples/embed_texts.py [model]        (a directory or a hub name; texts need its tokenizer)
"""

import sys
import tempfile

import torch
import transformers

from ostinato import LLM, GraphConfig

TEXTS = [
    "An ostinato is a musical pattern that repeats.",
    "A CUDA graph is captured once and replayed for every batch that follows.",
    "The tide comes in twice a day.",
]
QUERY = "Which music repeats?"


def random_encoder(directory: str) -> str:
    """Save a tiny BERT, which has no tokenizer, and return its directory."""
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        max_position_embeddings=128,
    )
    transformers.BertModel(config).save_pretrained(directory)
    return directory


def main(model: str | None = None) -> None:
    with tempfile.TemporaryDirectory() as directory:
        graphs = GraphConfig(capture_sizes=[32, 64, 128, 256])
        with LLM(model or random_encoder(directory), graphs=graphs, show_progress=False) as llm:
            # Without a tokenizer, the bytes of a text serve as token ids.
            as_input = str if llm.tokenizer is not None else lambda text: list(text.encode())
            texts, query = [as_input(text) for text in TEXTS], as_input(QUERY)
            lengths = [result.embedding.norm().item() for result in llm.embed(texts)]
            scores = [result.score for result in llm.score([query], texts)]
            runner = llm.pooling.runner
            stats, report = runner.stats, runner.capture_report
    for text, score in sorted(zip(TEXTS, scores, strict=True), key=lambda pair: -pair[1]):
        print(f"{score:6.3f}  {text}")
    print(f"lengths {', '.join(f'{length:.3f}' for length in lengths)}")
    print(f"{report.num_graphs} graphs, {stats.hits} replays, {stats.padding_fraction:.0%} padding")
    for reason, count in stats.eager.items():
        print(f"{count} eager batches: {reason.value}")


if __name__ == "__main__":
    main(*sys.argv[1:])
