"""Which GEMMs of a decoder have tile configs to measure, and what is fused with each."""

from __future__ import annotations

import pytest
import torch
from transformers import Gemma2Config, Qwen3Config

from ostinato.models.native.config.decoder_config import DecoderConfig
from ostinato.models.native.decoder import Decoder
from ostinato.models.native.shapes import shape_config
from ostinato.ops.gemm.tile_config import ROW_CLASSES
from ostinato.ops.gemm.tuning import tuning


@pytest.mark.parametrize("tied", [True, False])
def test_every_gemm_of_the_model_is_there(tied: bool) -> None:
    config = DecoderConfig.from_hf(
        Qwen3Config(
            vocab_size=100,
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=32,
            tie_word_embeddings=tied,
        )
    )
    model = Decoder(config, device=torch.device("cpu"), dtype=torch.bfloat16)
    weights = model.tunable_gemms()
    seen = {(s.n, s.k, s.norm, s.gated, s.residual): len(w) for s, w in weights.items()}
    assert seen == {
        (256, 64, True, False, False): 3,  # QKV
        (64, 128, False, False, True): 3,
        (192, 64, True, True, False): 3,
        (64, 96, False, False, True): 3,
        (100, 64, True, False, False): 1,
    }
    assert len(weights) == 5 * len(ROW_CLASSES)
    head = next(w[0] for s, w in weights.items() if s.n == 100)
    assert (head is model.embed_tokens.weight) == tied


def test_what_is_fused_with_a_gemm_is_measured_with_it() -> None:
    config = DecoderConfig.from_hf(
        Gemma2Config(
            vocab_size=100,
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=32,
        )
    )
    weights = Decoder(config, device=torch.device("meta"), dtype=torch.bfloat16).tunable_gemms()
    qkv, output, gate_up, head = 256, 64, 192, 100
    assert {s.n for s in weights} == {qkv, output, gate_up, head}
    # Norms behind attention and MLP are no part of a GEMM, and keep residuals out of it.
    assert {s.n for s in weights if s.norm} == {head}
    assert {s.n for s in weights if s.gated} == {gate_up}
    assert not any(s.residual for s in weights)


def test_a_known_shape_has_entries_for_an_h200() -> None:
    model = Decoder(
        DecoderConfig.from_hf(shape_config("llama-3.2-1b")),
        device=torch.device("meta"),
        dtype=torch.bfloat16,
        max_position=1,
    )
    for shape in model.tunable_gemms():
        assert tuning().get(shape.key("NVIDIA H200")) is not None, shape
