"""An image in a chat: a tiny Qwen2-VL with random weights, or a model of yours.

python examples/describe_image.py [model] [image]        (a directory or a hub name; a file)
"""

import sys
import tempfile

import torch
import transformers
from PIL import Image
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from ostinato import LLM, SamplingParams

START, END, IMAGE = 2, 3, 4  # tokens of the tiny model, which has no tokenizer


def random_model(directory: str) -> str:
    """Save a tiny Qwen2-VL and its image processor, and return its directory."""
    torch.manual_seed(0)
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
    config = transformers.Qwen2VLConfig(
        text_config={
            "vocab_size": 256,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 1024,
            "rope_parameters": rope,
        },
        vision_config={"depth": 2, "embed_dim": 32, "hidden_size": 64, "num_heads": 2},
        image_token_id=IMAGE,
        vision_start_token_id=START,
        vision_end_token_id=END,
    )
    transformers.Qwen2VLForConditionalGeneration(config).save_pretrained(directory)
    Qwen2VLImageProcessorPil().save_pretrained(directory)
    return directory


def main(model: str | None = None, file: str | None = None) -> None:
    image = Image.new("RGB", (280, 168), "teal") if file is None else Image.open(file)
    params = SamplingParams(temperature=0, max_tokens=32)
    with (
        tempfile.TemporaryDirectory() as directory,
        LLM(model or random_model(directory), show_progress=False) as llm,
    ):
        if llm.tokenizer is None:
            prompt = {"prompt_token_ids": [5, START, IMAGE, END, 6], "images": [image]}
            (result,) = llm.generate(prompt, params)
        else:
            parts = [{"type": "image", "image": image}, {"type": "text", "text": "What is it?"}]
            (result,) = llm.chat([{"role": "user", "content": parts}], params)
        vision = llm.engine.runner.images.vision
        stats, graphs = vision.stats, vision.capture_report.num_graphs
    print(result.outputs[0].text or result.outputs[0].token_ids)
    print(f"{len(result.prompt_token_ids)} tokens in the prompt")
    print(f"vision encoder: {graphs} graphs, {stats.hits} replays, {stats.misses} eager")


if __name__ == "__main__":
    main(*sys.argv[1:])
