"""Which GEMMs of a model are measured; the measuring itself is tested in test_linear."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from transformers import Gemma2Config, Qwen3Config

from ostinato import ConfigError
from ostinato.config import EngineConfig
from ostinato.engine.tune import linear_weights, tune
from ostinato.models.native.decoder import Decoder
from ostinato.models.native.decoder_config import DecoderConfig
from ostinato.models.native.shapes import shape_config
from ostinato.ops.tile_config import ROW_CLASSES
from ostinato.runner import startup


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
    weights = linear_weights(model)
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
    weights = linear_weights(Decoder(config, device=torch.device("meta"), dtype=torch.bfloat16))
    assert {s.n for s in weights} == {256, 64, 192, 100}
    # Norms behind attention and MLP, and GeGLU, are no part of a GEMM.
    assert not any(s.norm or s.gated or s.residual for s in weights)


def test_a_known_shape_has_entries_for_an_h200() -> None:
    from ostinato.ops.tuning import tuning

    model = Decoder(
        DecoderConfig.from_hf(shape_config("llama-3.2-1b")),
        device=torch.device("meta"),
        dtype=torch.bfloat16,
        max_position=1,
    )
    for shape in linear_weights(model):
        assert tuning().get(shape.key("NVIDIA H200")) is not None, shape


@pytest.mark.parametrize(
    ("native", "message"),
    [(True, "nothing to tune in float32; use bfloat16"), (False, "transformers' modules")],
)
def test_models_without_kernels_to_tune_are_refused(
    monkeypatch: pytest.MonkeyPatch, native: bool, message: str
) -> None:
    """On a GPU, that is; on the CPU nothing is tuned at all (test_cli)."""
    config = EngineConfig(model="tiny", random_weights=True, device="cpu", dtype="float32")
    loaded = startup.load(config) if native else SimpleNamespace(model=torch.nn.Identity())
    monkeypatch.setattr(EngineConfig, "torch_device", lambda self: torch.device("cuda"))
    monkeypatch.setattr(startup, "load", lambda config: loaded)
    with pytest.raises(ConfigError, match=message):
        tune(config)
