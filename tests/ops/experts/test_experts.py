"""Mixtures of experts against float64, token by token, and routers against transformers'.

Without a GPU the kernels run in Triton's interpreter. GPU-only tests are in
``tests/gpu/test_experts_gpu.py``.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import Glm4MoeConfig, Qwen3MoeConfig
from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeTopkRouter
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from ostinato.ops.experts.expert_kernels import RoutedToken, down_row, expert_parts, gate_up_row
from ostinato.ops.experts.expert_tiles import block_rows, expert_tiles, most_blocks
from ostinato.ops.experts.experts import run_experts
from ostinato.ops.experts.mixture import Mixture
from ostinato.ops.experts.own_experts import run_own_experts
from ostinato.ops.experts.routing import NO_EXPERT, RouterOptions, route
from ostinato.ops.gemm.linear import Norm

pytest.importorskip("triton")


class Case:
    """A mixture, its inputs with padding, and its result in float64, one token at a time."""

    def __init__(
        self,
        options: RouterOptions,
        *,
        num_tokens: int,
        num_experts: int = 8,
        hidden: int = 48,
        width: int = 24,
        biases: bool = False,
        norm: bool = True,
        padding: tuple[int, ...] = (),
        one_expert: bool = False,
    ) -> None:
        self._generator = torch.Generator().manual_seed(num_tokens + num_experts + hidden)
        draw = self._draw
        self.x = draw(num_tokens, hidden)
        self.slots = torch.arange(num_tokens)
        self.slots[list(padding)] = -1
        self.x[list(padding)] = torch.nan  # poison
        self.norm = Norm(draw(hidden), 1e-5) if norm else None
        clamped = biases
        self.mixture = Mixture(
            options=options,
            router=draw(num_experts, hidden, scale=hidden**-0.5),
            gate_up=draw(num_experts, 2 * width, hidden, scale=2 * hidden**-0.5),
            down=draw(num_experts, hidden, width, scale=2 * width**-0.5),
            router_bias=draw(num_experts) if biases else None,
            gate_up_bias=draw(num_experts, 2 * width) if biases else None,
            down_bias=draw(num_experts, hidden) if biases else None,
            correction=draw(num_experts, scale=0.2) if options.scoring == "sigmoid" else None,
            load=torch.full((num_experts,), 5),
            activation="clamped_swiglu" if clamped else "silu",
        )
        if one_expert:
            self.mixture.router[1:] = self.mixture.router[0] * 0.5
        self.counts = torch.zeros(num_experts, dtype=torch.int64)

    def _draw(self, *shape: int, scale: float = 1.0) -> Tensor:
        return torch.randn(*shape, generator=self._generator) * scale

    def expected(self) -> Tensor:
        return torch.stack([self._token(index) for index in range(self.x.shape[0])])

    def _token(self, index: int) -> Tensor:
        mixture, options = self.mixture, self.mixture.options
        if self.slots[index] < 0:
            return torch.zeros(self.x.shape[1], dtype=torch.float64)
        x = self.x[index].double()
        if self.norm is not None:
            x = x / (x.square().mean() + self.norm.eps).sqrt() * self.norm.weight.double()
        logits = mixture.router.double() @ x
        if mixture.router_bias is not None:
            logits = logits + mixture.router_bias.double()
        scores = logits.softmax(0) if options.scoring == "softmax" else logits.sigmoid()
        choice = scores if mixture.correction is None else scores + mixture.correction.double()
        if options.num_groups > 1:
            groups = choice.view(options.num_groups, -1)
            best = (
                groups.sort(1)
                .values[:, -options.group_best :]
                .sum(1)
                .topk(options.top_groups)
                .indices
            )
            for group in set(range(options.num_groups)) - set(best.tolist()):
                groups[group] = -torch.inf
            choice = groups.flatten()
        chosen = choice.topk(options.top_k).indices.tolist()
        self.counts[chosen] += 1
        total = sum(scores[expert] for expert in chosen) if options.renormalize else 1.0
        return sum(  # type: ignore[return-value]
            self._expert(x, expert) * scores[expert] / total * options.scale for expert in chosen
        )

    def _expert(self, x: Tensor, expert: int) -> Tensor:
        mixture = self.mixture
        gate_up = mixture.gate_up[expert].double() @ x
        if mixture.gate_up_bias is None or mixture.down_bias is None:
            gate, up = gate_up.chunk(2)
            return mixture.down[expert].double() @ (F.silu(gate) * up)
        gate, up = (gate_up + mixture.gate_up_bias[expert].double()).chunk(2)
        gate, up = gate.clamp(max=7), up.clamp(-7, 7)
        inner = (up + 1) * gate * torch.sigmoid(1.702 * gate)
        return mixture.down[expert].double() @ inner + mixture.down_bias[expert].double()

    def check(self, y: Tensor) -> None:
        expected = self.expected()
        torch.testing.assert_close(y.double(), expected, rtol=2e-5, atol=1e-4)
        assert self.mixture.load is not None
        assert torch.equal(self.mixture.load - 5, self.counts)


OPTIONS = {
    "softmax": RouterOptions(top_k=3),
    "scores as they are": RouterOptions(top_k=2, renormalize=False),
    "sigmoid": RouterOptions(top_k=3, scoring="sigmoid", scale=1.5),
    "groups": RouterOptions(top_k=2, scoring="sigmoid", num_groups=4, top_groups=2, scale=2.5),
    "best of groups": RouterOptions(
        top_k=2, renormalize=False, num_groups=4, top_groups=2, scale=2.5, group_best=1
    ),
    "one": RouterOptions(top_k=1),
}


@pytest.mark.parametrize("biases", [False, True])
@pytest.mark.parametrize("name", OPTIONS)
def test_reference(name: str, biases: bool) -> None:
    case = Case(OPTIONS[name], num_tokens=9, norm=False, biases=biases, padding=(0, 4))
    case.check(run_experts(case.x, case.mixture, case.slots))


@pytest.mark.sweep
@pytest.mark.parametrize("num_tokens", [1, 5, 37])
@pytest.mark.parametrize("name", OPTIONS)
def test_tile_kernels(name: str, num_tokens: int) -> None:
    padding = (num_tokens - 1,) if num_tokens > 1 else ()
    case = Case(OPTIONS[name], num_tokens=num_tokens, padding=padding, biases=num_tokens == 5)
    parts = expert_parts(case.x, case.mixture, case.slots, case.norm)
    assert parts.shape == (case.mixture.options.top_k, *case.x.shape)
    case.check(parts.sum(0))


@pytest.mark.sweep
@pytest.mark.parametrize("name", OPTIONS)
def test_row_kernels(name: str) -> None:
    case = Case(OPTIONS[name], num_tokens=1, biases=name == "softmax", hidden=36, width=20)
    residual = torch.randn(1, 36)
    y = down_row(gate_up_row(case.x, case.mixture, case.slots, case.norm), residual)
    case.check(y - residual)


def test_a_row_of_padding() -> None:
    case = Case(OPTIONS["softmax"], num_tokens=1, padding=(0,))
    residual = torch.randn(1, 48)
    y = down_row(gate_up_row(case.x, case.mixture, case.slots, case.norm), residual)
    assert torch.equal(y, residual)
    assert (case.mixture.load == 5).all()


def test_long_rows_go_by_blocks() -> None:
    """Wider than the blocks of the row kernels: 2048 inputs, and 1024."""
    case = Case(OPTIONS["one"], num_tokens=1, num_experts=3, hidden=4200, width=4, norm=False)
    expert = int((case.mixture.router.double() @ case.x[0].double()).argmax())
    gate, up = (case.mixture.gate_up[expert].double() @ case.x[0].double()).chunk(2)
    inner = gate_up_row(case.x, case.mixture, case.slots).inner
    torch.testing.assert_close(inner[0].double(), F.silu(gate) * up, rtol=2e-5, atol=1e-4)

    case = Case(OPTIONS["one"], num_tokens=1, num_experts=3, hidden=6, width=1100, norm=False)
    inner, logits = torch.randn(1, 1100), torch.tensor([[0.0, 2.0, 1.0]])
    y = down_row(RoutedToken(case.mixture, logits, inner, None), None)
    torch.testing.assert_close(y, inner @ case.mixture.down[1].T, rtol=2e-5, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("num_experts", [3, 60])
def test_odd_numbers_of_experts(num_experts: int) -> None:
    case = Case(OPTIONS["softmax"], num_tokens=6, num_experts=num_experts, hidden=40, width=17)
    case.check(expert_parts(case.x, case.mixture, case.slots, case.norm).sum(0))
    row = Case(OPTIONS["softmax"], num_tokens=1, num_experts=num_experts, hidden=40, width=17)
    row.check(down_row(gate_up_row(row.x, row.mixture, row.slots, row.norm), None))


def test_all_tokens_to_the_same_experts() -> None:
    """One expert has several blocks of tokens, and most have none."""
    case = Case(OPTIONS["one"], num_tokens=70, num_experts=16, norm=False, one_expert=True)
    case.x = case.x.abs()
    case.mixture.router[0] = 1.0
    case.mixture.router[1:] = -1.0
    case.check(expert_parts(case.x, case.mixture, case.slots, None).sum(0))
    assert case.counts[0] == 70


def of_rank(mixture: Mixture, first: int, own: int) -> Mixture:
    """What a rank with these experts has."""
    rows = slice(first, first + own)
    biases = (mixture.gate_up_bias, mixture.down_bias)
    gate_up_bias, down_bias = (None if bias is None else bias[rows] for bias in biases)
    return mixture._replace(
        first=first,
        gate_up=mixture.gate_up[rows],
        down=mixture.down[rows],
        gate_up_bias=gate_up_bias,
        down_bias=down_bias,
    )


@pytest.mark.slow
@pytest.mark.parametrize("kernels", [False, True])
@pytest.mark.parametrize(("name", "num_ranks"), [("softmax", 2), ("groups", 4), ("one", 8)])
def test_experts_over_ranks(name: str, num_ranks: int, kernels: bool) -> None:
    """The ranks' outputs add up to the mixture's, and so do their counts."""
    case = Case(OPTIONS[name], num_tokens=21, norm=False, biases=name == "one", padding=(0, 4))
    total = torch.zeros_like(case.x)
    for first in range(0, 8, 8 // num_ranks):
        own = of_rank(case.mixture, first, 8 // num_ranks)
        if kernels:
            parts = expert_parts(case.x, own, case.slots)
            assert (parts[:, [0, 4]] == 0).all()
            total += parts.sum(0)
        else:
            total += run_own_experts(case.x, own, case.slots)
    case.check(total)


def test_no_token_for_a_rank() -> None:
    case = Case(OPTIONS["one"], num_tokens=5, norm=False)
    case.mixture.router[4:] = 0.0
    case.mixture.router[:4] = case.x.sum(0)
    x = case.x.sum(0).expand(5, -1)
    assert (expert_parts(x, of_rank(case.mixture, 4, 4), case.slots) == 0).all()
    assert (case.mixture.load == 5).all()


def test_only_padding() -> None:
    case = Case(OPTIONS["softmax"], num_tokens=3, padding=(0, 1, 2))
    parts = expert_parts(case.x, case.mixture, case.slots, case.norm)
    assert (parts == 0).all()
    assert (case.mixture.load == 5).all()


@pytest.mark.sweep
@pytest.mark.parametrize("name", OPTIONS)
def test_a_token_with_a_nan_changes_no_other(name: str) -> None:
    case = Case(OPTIONS[name], num_tokens=5, norm=False)
    expected = case.expected()
    case.x[2] = torch.nan
    y = expert_parts(case.x, case.mixture, case.slots, None).sum(0)
    others = [0, 1, 3, 4]
    torch.testing.assert_close(y[others].double(), expected[others], rtol=2e-5, atol=1e-4)
    reference = run_experts(case.x, case.mixture, case.slots)
    torch.testing.assert_close(reference[others].double(), expected[others], rtol=2e-5, atol=1e-4)


# --- routing --------------------------------------------------------------------------------------


@pytest.mark.parametrize("renormalize", [False, True])
def test_softmax_router_of_transformers(renormalize: bool) -> None:
    config = Qwen3MoeConfig(
        hidden_size=16, num_experts=12, num_experts_per_tok=3, norm_topk_prob=renormalize
    )
    router = Qwen3MoeTopKRouter(config)
    torch.nn.init.normal_(router.weight)
    x = torch.randn(20, 16)
    logits, weights, experts = router(x)
    got = route(logits, RouterOptions(top_k=3, renormalize=renormalize))
    assert torch.equal(got.experts, experts)
    torch.testing.assert_close(got.weights, weights)


def test_sigmoid_router_of_transformers() -> None:
    config = Glm4MoeConfig(
        hidden_size=16,
        n_routed_experts=12,
        num_experts_per_tok=3,
        n_group=4,
        topk_group=2,
        routed_scaling_factor=2.5,
        norm_topk_prob=True,
    )
    router = Glm4MoeTopkRouter(config)
    torch.nn.init.normal_(router.weight)
    router.e_score_correction_bias.normal_(0.0, 0.3)
    logits, weights, experts = router(torch.randn(20, 16))
    options = RouterOptions(top_k=3, scoring="sigmoid", num_groups=4, top_groups=2, scale=2.5)
    got = route(logits, options, correction=router.e_score_correction_bias)
    order, expected_order = got.experts.argsort(1), experts.argsort(1)
    assert torch.equal(got.experts.gather(1, order), experts.gather(1, expected_order))
    torch.testing.assert_close(got.weights.gather(1, order), weights.gather(1, expected_order))


def test_padding_chooses_no_expert() -> None:
    routing = route(torch.randn(3, 4), RouterOptions(top_k=2), slots=torch.tensor([7, -1, 0]))
    assert (routing.experts[1] == NO_EXPERT).all()
    assert (routing.weights[1] == 0).all()
    assert (routing.experts[[0, 2]] >= 0).all()


# --- tiles ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_pairs", [1, 8, 32, 256, 2048, 65536])
@pytest.mark.parametrize("num_experts", [8, 60, 128])
def test_blocks_hold_every_choice(num_pairs: int, num_experts: int) -> None:
    block_m = block_rows(num_pairs, num_experts)
    most = most_blocks(num_pairs, num_experts, block_m)
    used = min(num_experts, num_pairs)
    generator = torch.Generator().manual_seed(num_pairs)
    # All to one expert; one to each and the rest to one; one more than whole blocks to each; any.
    worst = torch.ones(used, dtype=torch.int64)
    worst += (num_pairs - used) // block_m // used * block_m
    worst[0] += num_pairs - worst.sum()
    choices = [
        torch.tensor([num_pairs]),
        torch.tensor([num_pairs - used + 1, *[1] * (used - 1)]),
        worst,
        torch.randint(num_experts, (num_pairs,), generator=generator).bincount(),
    ]
    blocks = []
    for counts in choices:
        assert counts.sum() == num_pairs
        blocks.append(int((-(-counts // block_m)).sum()))
    assert max(blocks) == most  # and no more programs than that


@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("block_m", [16, 32, 64, 128])
@pytest.mark.parametrize("shared_memory", [99 * 1024, 163 * 1024, 227 * 1024])
def test_tiles_fit(itemsize: int, block_m: int, shared_memory: int) -> None:
    for gated, (outputs, inner) in ((True, (768, 2048)), (False, (2048, 768)), (True, (1408, 64))):
        tiles = expert_tiles(
            block_m, outputs, inner, itemsize, gated=gated, shared_memory=shared_memory
        )
        rows = (2 if gated else 1) * tiles.block_n + block_m
        assert tiles.num_stages * rows * tiles.block_k * itemsize <= shared_memory
