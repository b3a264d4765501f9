"""Embeddings, compared with transformers one prompt at a time, in every graph mode."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from tiny_encoders import (
    ENCODERS,
    MAX_LEN,
    PROMPTS,
    VOCAB_SIZE,
    open_encoder,
    save_encoder,
    save_modules,
)
from tiny_models import TINY_NATIVE, save_tiny

from ostinato import (
    LLM,
    CaptureError,
    ClosedError,
    ConfigError,
    GraphConfig,
    RequestError,
    compilation_counter,
)

NAN = float("nan")


def embeddings_of(llm: LLM, prompts: Any = PROMPTS, **options: Any) -> torch.Tensor:
    return torch.stack([each.embedding for each in llm.embed(prompts, **options)])


@torch.no_grad()
def states_of(model: Any, prompts: Any = PROMPTS) -> list[torch.Tensor]:
    """The hidden states of each prompt alone, by transformers."""
    base = model.base_model
    return [base(input_ids=torch.tensor([prompt])).last_hidden_state[0] for prompt in prompts]


def pooled(states: list[torch.Tensor], pooling: str) -> torch.Tensor:
    how = {"cls": lambda s: s[0], "last": lambda s: s[-1], "mean": lambda s: s.mean(0)}[pooling]
    return torch.stack([how(each) for each in states])


# --- values ------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.sweep
@pytest.mark.parametrize("mode", ["NONE", "PIECEWISE"])
@pytest.mark.parametrize("name", ENCODERS)
def test_embeddings_are_those_of_transformers(
    name: str, mode: str, device: torch.device, tmp_path: Path
) -> None:
    states = states_of(save_encoder(tmp_path, name))
    with open_encoder(tmp_path, device, mode=mode) as llm:
        for pooling in ("cls", "last", "mean"):
            expected = pooled(states, pooling)
            raw = embeddings_of(llm, pooling=pooling, normalize=False)
            torch.testing.assert_close(raw, expected, atol=2e-5, rtol=1e-4)
            unit = embeddings_of(llm, pooling=pooling)
            torch.testing.assert_close(unit, F.normalize(expected), atol=1e-5, rtol=1e-4)
        assert (llm.pooling.runner.stats.hits > 0) == (mode == "PIECEWISE")


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("name", "auto", "pooling"),
    [
        ("qwen3", transformers.AutoModelForCausalLM, "last"),
        ("qwen3", transformers.AutoModel, "last"),
        ("bert", transformers.AutoModelForMaskedLM, "mean"),
        ("modernbert", transformers.AutoModelForMaskedLM, "mean"),
    ],
)
def test_heads_are_left_out_and_pooling_follows_the_architecture(
    name: str, auto: Any, pooling: str, tmp_path: Path
) -> None:
    model = save_encoder(tmp_path, name, auto)
    expected = F.normalize(pooled(states_of(model), pooling))
    with open_encoder(tmp_path, task="embed") as llm:
        torch.testing.assert_close(embeddings_of(llm), expected, atol=1e-5, rtol=1e-4)


@pytest.mark.slow
def test_the_language_model_of_gemma_3_embeds(tmp_path: Path) -> None:
    """In a checkpoint with an image encoder and a head of its own."""
    tower = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2}
    config = transformers.Gemma3Config(
        text_config=TINY_NATIVE["gemma3"]().to_dict(),
        vision_config={**tower, "num_hidden_layers": 1, "image_size": 28, "patch_size": 14},
        mm_tokens_per_image=4,
        image_token_id=VOCAB_SIZE - 1,
        tie_word_embeddings=False,
    )
    save_tiny(config, tmp_path, auto=transformers.AutoModelForImageTextToText)
    model = transformers.AutoModel.from_pretrained(tmp_path, dtype=torch.float32)
    prompt = list(range(5, 25))
    with torch.no_grad():
        last = model(torch.tensor([prompt])).last_hidden_state[0, -1]
    with open_encoder(tmp_path, task="embed") as llm:
        torch.testing.assert_close(embeddings_of(llm, [prompt])[0], F.normalize(last, dim=0))


def test_dimensions_are_cut_before_normalising(tmp_path: Path) -> None:
    expected = pooled(states_of(save_encoder(tmp_path)), "mean")[:, :16]
    with open_encoder(tmp_path) as llm:
        cut = embeddings_of(llm, dimensions=16)
        torch.testing.assert_close(cut, F.normalize(expected), atol=1e-5, rtol=1e-4)


def test_embeddings_are_plain_tensors_of_their_own(tmp_path: Path) -> None:
    save_encoder(tmp_path)
    with open_encoder(tmp_path) as llm:
        first = llm.embed(PROMPTS)
        copies = [each.embedding.clone() for each in first]
        llm.embed([[5, 6, 7]])
    for each, copy, prompt in zip(first, copies, PROMPTS, strict=True):
        assert torch.equal(each.embedding, copy)
        assert each.prompt_token_ids == prompt
        assert not each.embedding.is_inference()
        assert each.embedding.untyped_storage().nbytes() == 64 * 4
        assert (each.embedding.device.type, each.embedding.dtype) == ("cpu", torch.float32)


# --- batches and graphs ------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["modernbert", "qwen3"])
def test_results_do_not_depend_on_order_or_company(
    name: str, device: torch.device, tmp_path: Path
) -> None:
    save_encoder(tmp_path, name)
    with open_encoder(tmp_path, device) as llm:
        together = embeddings_of(llm)
        backwards = embeddings_of(llm, PROMPTS[::-1]).flip(0)
        alone = torch.cat([embeddings_of(llm, [prompt]) for prompt in PROMPTS])
    for other in (backwards, alone):
        torch.testing.assert_close(together, other, atol=1e-5, rtol=1e-4)


def test_replays_equal_eager_to_the_bit(device: torch.device, tmp_path: Path) -> None:
    save_encoder(tmp_path, "modernbert")
    prompts = [PROMPTS[2], PROMPTS[3]]  # 32 tokens: no padding
    results = []
    for mode in ("NONE", "PIECEWISE"):
        with open_encoder(tmp_path, device, mode=mode) as llm:
            results.append(embeddings_of(llm, prompts))
            assert llm.pooling.runner.stats.padding_tokens == 0
    assert torch.equal(*results)


@pytest.mark.parametrize("name", ["bert", "modernbert", "mistral"])
def test_padding_reaches_no_result(name: str, device: torch.device, tmp_path: Path) -> None:
    """Every padding row is NaN in every layer: token 0 embeds to NaN, and no prompt has it."""
    save_encoder(tmp_path, name)
    with open_encoder(tmp_path, device) as llm:
        clean = embeddings_of(llm)
        llm.pooling.model.model.get_input_embeddings().weight[0] = NAN
        runner = llm.pooling.runner
        runner.stats.reset()
        poisoned = embeddings_of(llm)
        assert runner.stats.hits > 0
        assert runner.stats.padding_tokens > 0
    assert torch.equal(clean, poisoned)


def test_batches_keep_the_limits_of_a_step_and_are_counted(tmp_path: Path) -> None:
    save_encoder(tmp_path)
    prompts = [[5] * 10] * 7 + [[6] * 60]
    with open_encoder(tmp_path, max_num_seqs=3, max_num_batched_tokens=70, sizes=[32]) as llm:
        llm.embed(prompts)
        stats = llm.pooling.runner.stats
    # By length: 3 of 10, 3 of 10, then one of 10 with the one of 60.
    assert stats.hits == 2
    assert stats.padding_tokens == 4
    assert {reason.name: count for reason, count in stats.eager.items()} == {"TOO_LARGE": 1}


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("mode", "triggers", "captured"), [("NONE", 0, 0), ("PIECEWISE", 1, 13), (None, 1, 13)]
)
def test_numbers_of_graphs(mode: Any, triggers: int, captured: int, tmp_path: Path) -> None:
    save_encoder(tmp_path, num_hidden_layers=12)
    sizes = [100]
    with (
        compilation_counter.expect(
            num_gpu_runner_capture_triggers=triggers, num_cudagraph_captured=captured
        ),
        open_encoder(tmp_path, mode=mode, sizes=sizes) as llm,
    ):
        report = llm.pooling.runner.capture_report
        assert report.num_graphs == captured
        llm.embed(PROMPTS)  # captures no more


@pytest.mark.parametrize("mode", ["FULL_AND_PIECEWISE", "FULL_DECODE_ONLY"])
def test_modes_with_full_graphs_become_piecewise(
    mode: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save_encoder(tmp_path)
    with caplog.at_level(logging.WARNING), open_encoder(tmp_path, mode=mode) as llm:
        assert llm.pooling.resolved_mode.mode.name == "PIECEWISE"
        llm.embed(PROMPTS)
        assert llm.pooling.runner.stats.hits > 0
    assert f"{mode} becomes PIECEWISE" in caplog.text


def test_full_graphs_are_refused(tmp_path: Path) -> None:
    save_encoder(tmp_path)
    with pytest.raises(ConfigError, match="FULL needs attention that can be captured"):
        open_encoder(tmp_path, mode="FULL")


def test_a_capture_that_fails_names_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_encoder(tmp_path)
    bert = transformers.models.bert.modeling_bert.BertIntermediate
    forward = bert.forward

    def reading(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
        hidden_states.sum().item()
        return forward(self, hidden_states)

    monkeypatch.setattr(bert, "forward", reading)
    with pytest.raises(CaptureError, match=r"aten.*run it without graphs: .*mode=.NONE"):
        open_encoder(tmp_path)
    with open_encoder(tmp_path, mode="NONE") as llm:
        llm.embed(PROMPTS)


def test_the_callers_autocast_changes_nothing(tmp_path: Path) -> None:
    save_encoder(tmp_path)
    with open_encoder(tmp_path) as llm:
        expected = embeddings_of(llm)
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(embeddings_of(llm), expected)


# --- what a checkpoint says --------------------------------------------------------------------


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("stated", "pooling"),
    [
        ({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}, "cls"),
        ({"pooling_mode_cls_token": False, "pooling_mode_lasttoken": True}, "last"),
        ({"pooling_mode_mean_tokens": True, "word_embedding_dimension": 64}, "mean"),
        ({"pooling_mode": "lasttoken"}, "last"),
    ],
)
def test_pooling_of_sentence_transformers(stated: Any, pooling: str, tmp_path: Path) -> None:
    """A checkpoint of a causal model with modules.json embeds, as Qwen3-Embedding does."""
    model = save_encoder(tmp_path, "qwen3", transformers.AutoModelForCausalLM)
    save_modules(tmp_path, stated, "Normalize")
    expected = F.normalize(pooled(states_of(model), pooling))
    with open_encoder(tmp_path) as llm:
        torch.testing.assert_close(embeddings_of(llm), expected, atol=1e-5, rtol=1e-4)


def test_texts_are_tokenized_as_the_checkpoint_says(tmp_path: Path) -> None:
    model = save_encoder(tmp_path, tokenizer=True)
    save_modules(tmp_path, {"pooling_mode_mean_tokens": True}, max_seq_length=6, do_lower_case=True)
    ids = [1, 10, 20, 30, 2]
    with open_encoder(tmp_path) as llm:
        for prompt in ("W10 w20 W30", {"prompt": "W10 w20 W30"}):
            (result,) = llm.embed(prompt)
            assert result.prompt_token_ids == ids
        assert llm.pooling.max_model_len == 6
        with pytest.raises(RequestError, match=r"the prompt has 7 tokens, .* at most 6"):
            llm.embed("w4 w5 w6 w7 w8")
        (cut,) = llm.embed("w4 w5 w6 w7 w8", truncate=True)
        assert cut.prompt_token_ids == [1, 4, 5, 6, 7, 2]
    expected = F.normalize(pooled(states_of(model, [ids]), "mean"))
    torch.testing.assert_close(result.embedding, expected[0], atol=1e-5, rtol=1e-4)


# --- requests that cannot run ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompts", "options", "message"),
    [
        ([], {}, "there are no prompts"),
        ([[4], []], {}, r"prompts\[1\] is empty"),
        ([[4], [VOCAB_SIZE]], {}, r"prompts\[1\] contains 128; token ids are .* 0 to 127"),
        ([[4] * (MAX_LEN + 1)], {}, "65 tokens, but a sequence has at most 64 .*truncate=True"),
        ("text", {}, "this model has no tokenizer"),
        ([[4]], {"pooling": "max"}, "pooling must be one of auto, cls, last, mean, got 'max'"),
        ([[4]], {"dimensions": 65}, "dimensions must be an integer from 1 to 64, .*got 65"),
        ([[4]], {"dimensions": 0}, "dimensions must be"),
        ([[4]], {"normalize": "no"}, "normalize must be True or False, got 'no'"),
        ([[4]], {"truncate": 8}, "truncate must be True or False, got 8"),
    ],
)
def test_bad_requests_are_named(
    prompts: Any, options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    save_encoder(tmp_path)
    with open_encoder(tmp_path, mode="NONE") as llm, pytest.raises(RequestError, match=message):
        llm.embed(prompts, **options)


def test_long_prompts_are_truncated_if_asked(tmp_path: Path) -> None:
    save_encoder(tmp_path)
    long = [4 + n % 100 for n in range(100)]
    with open_encoder(tmp_path) as llm:
        expected = embeddings_of(llm, [long[:MAX_LEN]])
        for prompt in (long, torch.tensor(long), range(4, 10**9)):
            (result,) = llm.embed([prompt], truncate=True)
            assert len(result.prompt_token_ids) == MAX_LEN
        assert torch.equal(embeddings_of(llm, [long], truncate=True), expected)


def test_a_step_must_hold_a_whole_prompt(tmp_path: Path) -> None:
    save_encoder(tmp_path)
    with open_encoder(tmp_path, max_num_batched_tokens=20, sizes=[8]) as llm:
        llm.embed([[4] * 20])
        with pytest.raises(RequestError, match=r"21 tokens, .* at most 20 .*batched_tokens"):
            llm.embed([[4] * 21])


def test_a_limit_that_was_not_given_adapts_to_the_longest_prompt(tmp_path: Path) -> None:
    save_encoder(tmp_path, max_position_embeddings=700)
    with open_encoder(tmp_path, max_num_batched_tokens=None, sizes=[8]) as llm:
        assert len(llm.embed([[4] * 700])) == 1


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_model_len": 65}, "max_model_len 65 exceeds the model's limit of 64"),
        ({"tensor_parallel_size": 2}, "run on one rank, not 2"),
        ({"data_parallel_size": 3}, "run on one rank, not 3"),
        ({"swiftkv_layers": 1}, "swiftkv_layers is for models that generate"),
        ({"speculative": "ngram"}, "speculative is for models that generate"),
    ],
)
def test_options_of_other_models_are_refused(
    settings: dict[str, Any], message: str, tmp_path: Path
) -> None:
    save_encoder(tmp_path)
    with pytest.raises(ConfigError, match=message):
        open_encoder(tmp_path, mode="NONE", **settings)


def test_compiling_is_refused(tmp_path: Path) -> None:
    save_encoder(tmp_path)
    with pytest.raises(ConfigError, match="compile=True is for models that generate"):
        LLM(tmp_path, device="cpu", graphs=GraphConfig(compile=True))


def test_unknown_tasks_are_refused() -> None:
    with pytest.raises(ConfigError, match="task must be one of auto, generate, embed, classify"):
        LLM(task="embedding")


# --- random weights ----------------------------------------------------------------------------


def test_random_weights_follow_the_seed(tmp_path: Path) -> None:
    save_encoder(tmp_path, "modernbert")
    (tmp_path / "model.safetensors").unlink()
    options = {"random_weights": True, "mode": "NONE"}
    results = []
    for seed in (1, 1, 2):
        with open_encoder(tmp_path, seed=seed, **options) as llm:
            results.append(embeddings_of(llm))
    assert torch.equal(results[0], results[1])
    assert not torch.allclose(results[0], results[2])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "task"),
    [("minilm-l6", "auto"), ("tiny", "embed"), ("tiny", "classify"), ("minilm-l6", "classify")],
)
def test_named_shapes(shape: str, task: str) -> None:
    with open_encoder(shape, task=task, random_weights=True, sizes=[8]) as llm:
        call = llm.classify if task == "classify" else llm.embed
        assert len(call([[4, 5], [6]])) == 2
        assert llm.pooling.runner.stats.hits == 1


def test_each_model_does_what_it_was_loaded_for(tmp_path: Path) -> None:
    save_encoder(tmp_path)
    with open_encoder(tmp_path, mode="NONE") as llm:
        for call in (llm.generate, llm.stream, llm.render_chat):
            with pytest.raises(RequestError, match="was loaded to embed, not to generate"):
                call([4])
        with pytest.raises(RequestError, match="was loaded to embed, not to classify"):
            llm.classify([4])


@pytest.mark.slow
def test_a_model_that_generates_does_not_embed() -> None:
    with LLM("tiny", random_weights=True, device="cpu", enforce_eager=True, max_num_seqs=2) as llm:
        for call in (llm.embed, llm.classify):
            with pytest.raises(RequestError, match="was loaded to generate; to embed or classify"):
                call([4])


def test_a_closed_model_says_so(tmp_path: Path) -> None:
    save_encoder(tmp_path)
    llm = open_encoder(tmp_path, mode="NONE")
    llm.close()
    llm.close()
    with pytest.raises(ClosedError, match="the engine is closed"):
        llm.embed([4])
