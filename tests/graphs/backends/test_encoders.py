"""Encoders of transformers with an attention mask, through ``graphed()`` on the CPU.

transformers reads the mask on the host, unless it is told that a CUDA graph is being captured. A
CPU recording tells it the same.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.cuda import is_current_stream_capturing

from ostinato import GraphPool, eager_break, graphed
from ostinato.errors import CaptureError

transformers = pytest.importorskip("transformers")

VOCABULARY = 50
LENGTH = 6
SIZES = [2, 4]
SMALL = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
}


def bert() -> Any:
    return transformers.BertModel, transformers.BertConfig(**SMALL)


def roberta() -> Any:
    return transformers.RobertaModel, transformers.RobertaConfig(**SMALL)


def distilbert() -> Any:
    return transformers.DistilBertModel, transformers.DistilBertConfig(
        vocab_size=VOCABULARY, dim=16, n_layers=2, n_heads=2, hidden_dim=32
    )


def t5() -> Any:
    return transformers.T5EncoderModel, transformers.T5Config(
        vocab_size=VOCABULARY, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2
    )


def clip_text() -> Any:
    return transformers.CLIPTextModel, transformers.CLIPTextConfig(**SMALL, eos_token_id=2)


def modernbert() -> Any:
    return transformers.ModernBertModel, transformers.ModernBertConfig(
        **SMALL, local_attention=4, pad_token_id=0
    )


FAMILIES: dict[str, Callable[[], Any]] = {
    function.__name__: function
    for function in (bert, roberta, distilbert, t5, clip_text, modernbert)
}


def ragged(rows: int) -> Tensor:
    lengths = torch.randint(1, LENGTH + 1, (rows, 1))
    return (torch.arange(LENGTH) < lengths).long()


def left_padded(rows: int) -> Tensor:
    return ragged(rows).flip(1)


def full(rows: int) -> Tensor:
    return torch.ones(rows, LENGTH, dtype=torch.int64)


MASKS = {function.__name__: function for function in (ragged, left_padded, full)}


class Hidden(nn.Module):
    """An encoder that returns one tensor. T5 has no position without its mask; all have one."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        output = self.model(input_ids=input_ids, attention_mask=attention_mask)
        return output.last_hidden_state  # type: ignore[no-any-return]


@pytest.fixture(params=[(f, a) for f in FAMILIES for a in ("eager", "sdpa")], ids=" ".join)
def encoder(request: pytest.FixtureRequest) -> Hidden:
    family, implementation = request.param
    model_class, config = FAMILIES[family]()
    torch.manual_seed(0)
    config._attn_implementation = implementation
    return Hidden(model_class(config)).eval()


@pytest.mark.sweep
@pytest.mark.parametrize("inference", [False, True], ids=["no_grad", "inference"])
def test_an_encoder_with_a_mask_is_captured_and_right(encoder: Hidden, inference: bool) -> None:
    """Every mask is replayed by the graphs that the first one was captured with."""
    torch.manual_seed(1)
    with (
        torch.inference_mode(inference),
        torch.no_grad(),
        graphed(encoder, sizes=SIZES, padding={"attention_mask": 1}) as model,
    ):
        for rows in (4, 3, 1, 2):
            for mask in MASKS.values():
                input_ids, attention_mask = torch.randint(3, VOCABULARY, (rows, LENGTH)), mask(rows)
                expected = encoder(input_ids, attention_mask)
                actual = model(input_ids, attention_mask)
                # What a padding token attends to does not matter.
                kept = attention_mask.bool()
                torch.testing.assert_close(actual[kept], expected[kept])
        assert model.stats().graphs == len(SIZES)
        assert model.stats().hits == 12


# --- who is told what -----------------------------------------------------------------------------


def capturing() -> bool:
    """torch's answer. Without CUDA it raises; transformers takes that as no."""
    try:
        answers = {is_current_stream_capturing(), torch.cuda.is_current_stream_capturing()}
    except RuntimeError:
        return False
    (answer,) = answers
    return answer


def test_a_recording_is_a_capture_and_nothing_else_is(
    pool: GraphPool, device: torch.device
) -> None:
    x = torch.ones(4, device=device)
    seen: dict[str, bool] = {}

    @eager_break
    def outside(x: Tensor) -> Tensor:
        seen["eager break"] = capturing()
        return x * 2

    def ask(where: str) -> None:
        seen[where] = capturing()

    def function() -> Tensor:
        ask("recording")
        y = outside(x + 1)
        ask("after the break")
        thread = threading.Thread(target=ask, args=("another thread",))
        thread.start()
        thread.join()
        return y + 1

    ask("before")
    captured = pool.capture(function, split_at_breaks=True)
    ask("after")
    assert seen.pop("eager break") is False
    pool.replay(captured.tape)
    assert seen == {
        "before": False,
        "recording": True,
        "after the break": True,
        "another thread": False,
        "eager break": False,
        "after": False,
    }


def test_a_capture_that_failed_is_over(pool: GraphPool, device: torch.device) -> None:
    x = torch.ones(4, device=device)
    with pytest.raises(CaptureError):
        pool.capture(lambda: x * x.sum().item())
    assert not capturing()
    with pytest.raises(LookupError):
        pool.capture(lambda: [][0])
    assert not capturing()


def test_a_warm_up_is_not_a_capture(device: torch.device) -> None:
    seen = []

    def function(x: Tensor) -> Tensor:
        seen.append(capturing())
        return x * 2

    with graphed(function, sizes=[2], num_warmups=3, check_state_every=0) as model:
        model(torch.ones(2, 3, device=device))
    # The rehearsal and the warm-ups, the one capture, and the call to compare with.
    assert seen.index(True) > 3
    assert seen.count(True) == 1
    assert seen[-1] is False


def test_questions_about_tracing_are_answered_as_eagerly(
    pool: GraphPool, device: torch.device
) -> None:
    """A capture of the other kind: code that asks for a compiler or tracer finds none."""

    def answers() -> list[bool]:
        return [
            torch.compiler.is_compiling(),
            torch.compiler.is_dynamo_compiling(),
            torch.compiler.is_exporting(),
            torch.jit.is_tracing(),
            torch.jit.is_scripting(),
            torch.overrides.has_torch_function((torch.ones(1),)),
            torch.overrides.has_torch_function((nn.Parameter(torch.ones(1)),)),
        ]

    assert pool.capture(answers).output == answers() == [False] * 7
