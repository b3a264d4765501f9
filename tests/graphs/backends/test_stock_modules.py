"""All of torch.nn: a graph gives, bit for bit, what the module gives eagerly, or is refused.

torch's modules look at more than their inputs: whether a mode is active, whether gradients are
enabled, whether there is a mask. None of that may differ between a run and its capture.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

from ostinato import GraphPool
from ostinato.errors import CaptureError

Inputs = Callable[[], tuple[Any, ...]]
Case = tuple[Callable[[], nn.Module], Inputs]


def floats(*shapes: tuple[int, ...]) -> Inputs:
    return lambda: tuple(torch.randn(shape) for shape in shapes)


def line() -> Tensor:
    return torch.randn(2, 4, 8)


def image() -> Tensor:
    return torch.randn(2, 4, 6, 6)


def volume() -> Tensor:
    return torch.randn(2, 4, 4, 4, 4)


ROWS = floats((4, 8))
IMAGE_OF = {1: lambda: (line(),), 2: lambda: (image(),), 3: lambda: (volume(),)}


def ints(below: int, *shape: int) -> Tensor:
    return torch.randint(below, shape)


def ragged(rows: int = 3, length: int = 5) -> Tensor:
    """True where a row is padding, on the right, as ``key_padding_mask`` wants it."""
    return torch.arange(length)[None] >= torch.randint(1, length, (rows, 1))


def holes(rows: int = 3, length: int = 5) -> Tensor:
    """A padding mask that nested tensors cannot express; the first key is always there."""
    mask = torch.rand(rows, length) < 0.5
    mask[:, 0] = False
    return mask


def causal(length: int = 5) -> Tensor:
    return nn.Transformer.generate_square_subsequent_mask(length)


def unpool(dims: int) -> Case:
    pool = getattr(nn, f"MaxPool{dims}d")(2, return_indices=True)
    return lambda: getattr(nn, f"MaxUnpool{dims}d")(2), lambda: pool(*IMAGE_OF[dims]())


CASES: dict[str, Case] = {}


def add(name: str, make: Callable[[], nn.Module], inputs: Inputs) -> None:
    assert name not in CASES
    CASES[name] = make, inputs


# fmt: off
ACTIVATIONS = [
    "AlphaDropout", "CELU", "Dropout", "ELU", "FeatureAlphaDropout", "GELU", "GLU", "Hardshrink",
    "Hardsigmoid", "Hardswish", "Hardtanh", "Identity", "LeakyReLU", "LogSigmoid", "Mish",
    "PReLU", "RReLU", "ReLU", "ReLU6", "SELU", "SiLU", "Sigmoid", "Softplus", "Softshrink",
    "Softsign", "Tanh", "Tanhshrink", "Flatten",
]
# fmt: on
for activation in ACTIVATIONS:
    add(activation, getattr(nn, activation), ROWS)
for inplace in ("ReLU", "Hardtanh", "SiLU", "Dropout", "LeakyReLU", "ELU", "Mish", "RReLU"):
    add(f"{inplace} in place", partial(getattr(nn, inplace), inplace=True), ROWS)
for over_a_dimension in ("Softmax", "LogSoftmax", "Softmin"):
    add(over_a_dimension, partial(getattr(nn, over_a_dimension), dim=-1), ROWS)
add("Softmax2d", nn.Softmax2d, IMAGE_OF[2])
add("Threshold", lambda: nn.Threshold(0.1, 20.0), ROWS)
add("GELU tanh", lambda: nn.GELU(approximate="tanh"), ROWS)

for d in (1, 2, 3):
    at = IMAGE_OF[d]
    for kind in ("AvgPool", "MaxPool"):
        add(f"{kind}{d}d", partial(getattr(nn, f"{kind}{d}d"), 2), at)
        add(f"Adaptive{kind}{d}d", partial(getattr(nn, f"Adaptive{kind}{d}d"), 2), at)
    add(f"LPPool{d}d", partial(getattr(nn, f"LPPool{d}d"), 2.0, 2), at)
    add(f"MaxUnpool{d}d", *unpool(d))
    for kind in ("Conv", "ConvTranspose"):
        add(f"{kind}{d}d", partial(getattr(nn, f"{kind}{d}d"), 4, 6, 3, padding=1), at)
        add(f"{kind}{d}d grouped", partial(getattr(nn, f"{kind}{d}d"), 4, 6, 2, groups=2), at)
        add(f"Lazy{kind}{d}d", partial(getattr(nn, f"Lazy{kind}{d}d"), 6, 2), at)
    for kind in ("BatchNorm", "InstanceNorm"):
        add(f"{kind}{d}d", partial(getattr(nn, f"{kind}{d}d"), 4, affine=True), at)
        add(f"{kind}{d}d stateless", partial(getattr(nn, f"{kind}{d}d"), 4, affine=False), at)
        add(f"Lazy{kind}{d}d", getattr(nn, f"Lazy{kind}{d}d"), at)
    for kind in ("Circular", "Reflection", "Replication", "Zero"):
        add(f"{kind}Pad{d}d", partial(getattr(nn, f"{kind}Pad{d}d"), 1), at)
    add(f"ConstantPad{d}d", partial(getattr(nn, f"ConstantPad{d}d"), 1, 0.5), at)
    add(f"Dropout{d}d", getattr(nn, f"Dropout{d}d"), at)
add("Conv1d circular", lambda: nn.Conv1d(4, 6, 3, padding_mode="circular"), IMAGE_OF[1])
add("BatchNorm1d rows", lambda: nn.BatchNorm1d(8), ROWS)
add("BatchNorm1d average", lambda: nn.BatchNorm1d(8, momentum=None), ROWS)
add("BatchNorm1d untracked", lambda: nn.BatchNorm1d(8, track_running_stats=False), ROWS)
add("SyncBatchNorm", lambda: nn.SyncBatchNorm(4), IMAGE_OF[2])
add("InstanceNorm1d tracked", lambda: nn.InstanceNorm1d(4, track_running_stats=True), IMAGE_OF[1])
add("FractionalMaxPool2d", lambda: nn.FractionalMaxPool2d(2, output_size=3), IMAGE_OF[2])
add("FractionalMaxPool3d", lambda: nn.FractionalMaxPool3d(2, output_size=2), IMAGE_OF[3])
add("GroupNorm", lambda: nn.GroupNorm(2, 4), IMAGE_OF[2])
add("LayerNorm", lambda: nn.LayerNorm(8), ROWS)
add("RMSNorm", lambda: nn.RMSNorm(8), ROWS)
add("LocalResponseNorm", lambda: nn.LocalResponseNorm(2), IMAGE_OF[2])
add("CrossMapLRN2d", lambda: nn.CrossMapLRN2d(2), IMAGE_OF[2])
add("ChannelShuffle", lambda: nn.ChannelShuffle(2), IMAGE_OF[2])
add("PixelShuffle", lambda: nn.PixelShuffle(2), IMAGE_OF[2])
add("PixelUnshuffle", lambda: nn.PixelUnshuffle(2), IMAGE_OF[2])
add("Unfold", lambda: nn.Unfold(2), IMAGE_OF[2])
add("Fold", lambda: nn.Fold((4, 4), 2), floats((2, 4, 9)))
add("Unflatten", lambda: nn.Unflatten(1, (2, 4)), ROWS)
add("Upsample", lambda: nn.Upsample(scale_factor=2, mode="bicubic"), IMAGE_OF[2])
add("UpsamplingBilinear2d", lambda: nn.UpsamplingBilinear2d(scale_factor=2), IMAGE_OF[2])
add("UpsamplingNearest2d", lambda: nn.UpsamplingNearest2d(scale_factor=2), IMAGE_OF[2])

add("Linear", lambda: nn.Linear(8, 5), ROWS)
add("Linear 3d", lambda: nn.Linear(8, 5), floats((2, 3, 8)))
add("Linear no bias", lambda: nn.Linear(8, 5, bias=False), ROWS)
add("LazyLinear", lambda: nn.LazyLinear(5), ROWS)
add("Bilinear", lambda: nn.Bilinear(8, 3, 5), floats((4, 8), (4, 3)))
add("Embedding", lambda: nn.Embedding(9, 5, padding_idx=0), lambda: (ints(9, 4, 3),))
add("Embedding max_norm", lambda: nn.Embedding(9, 5, max_norm=1.0), lambda: (ints(9, 4, 3),))
add("EmbeddingBag", lambda: nn.EmbeddingBag(9, 5), lambda: (ints(9, 4, 3),))
add(
    "EmbeddingBag offsets",
    lambda: nn.EmbeddingBag(9, 5, mode="sum"),
    lambda: (ints(9, 7), torch.tensor([0, 2, 4]), torch.randn(7)),
)
add("CosineSimilarity", nn.CosineSimilarity, floats((4, 8), (4, 8)))
add("PairwiseDistance", nn.PairwiseDistance, floats((4, 8), (4, 8)))
add("Sequential", lambda: nn.Sequential(nn.Linear(8, 8), nn.ReLU(True), nn.Dropout()), ROWS)
add("DataParallel", lambda: nn.DataParallel(nn.Linear(8, 5)), ROWS)

for cell in ("RNNCell", "GRUCell", "LSTMCell"):
    add(cell, partial(getattr(nn, cell), 8, 5), ROWS)
for layer in ("RNN", "GRU", "LSTM"):
    add(layer, partial(getattr(nn, layer), 8, 5, 2, dropout=0.5), floats((3, 2, 8)))
    add(
        f"{layer} both ways",
        partial(getattr(nn, layer), 8, 5, bidirectional=True, batch_first=True),
        floats((3, 2, 8)),
    )
add("RNN relu", lambda: nn.RNN(8, 5, nonlinearity="relu"), floats((3, 2, 8), (1, 2, 5)))
add("LSTM projected", lambda: nn.LSTM(8, 5, proj_size=3), floats((3, 2, 8)))

# --- losses ---------------------------------------------------------------------------------------

for loss in ("HuberLoss", "L1Loss", "MSELoss", "SmoothL1Loss", "BCEWithLogitsLoss", "KLDivLoss"):
    add(loss, getattr(nn, loss), lambda: (torch.randn(4, 8), torch.rand(4, 8)))
    add(
        f"{loss} none",
        partial(getattr(nn, loss), reduction="none"),
        lambda: (torch.randn(4, 8), torch.rand(4, 8)),
    )
add("BCELoss", nn.BCELoss, lambda: (torch.rand(4, 8), torch.rand(4, 8)))
add("PoissonNLLLoss", nn.PoissonNLLLoss, lambda: (torch.randn(4, 8), torch.rand(4, 8)))
add("SoftMarginLoss", nn.SoftMarginLoss, lambda: (torch.randn(4), ints(2, 4) * 2.0 - 1))
add("HingeEmbeddingLoss", nn.HingeEmbeddingLoss, lambda: (torch.randn(4), ints(2, 4) * 2.0 - 1))
add(
    "MarginRankingLoss",
    nn.MarginRankingLoss,
    lambda: (torch.randn(4), torch.randn(4), ints(2, 4) * 2.0 - 1),
)
add(
    "CosineEmbeddingLoss",
    nn.CosineEmbeddingLoss,
    lambda: (torch.randn(4, 8), torch.randn(4, 8), ints(2, 4) * 2.0 - 1),
)
add("TripletMarginLoss", nn.TripletMarginLoss, floats((4, 8), (4, 8), (4, 8)))
add(
    "TripletMarginWithDistanceLoss",
    nn.TripletMarginWithDistanceLoss,
    floats((4, 8), (4, 8), (4, 8)),
)
add("CrossEntropyLoss", nn.CrossEntropyLoss, lambda: (torch.randn(4, 8), ints(8, 4)))
add(
    "CrossEntropyLoss weighted",
    lambda: nn.CrossEntropyLoss(torch.rand(8), ignore_index=3, label_smoothing=0.1),
    lambda: (torch.randn(4, 8), ints(8, 4)),
)
add("NLLLoss", nn.NLLLoss, lambda: (torch.randn(4, 8).log_softmax(-1), ints(8, 4)))
add("NLLLoss2d", nn.NLLLoss, lambda: (image().log_softmax(1), ints(4, 2, 6, 6)))
add("MultiMarginLoss", nn.MultiMarginLoss, lambda: (torch.randn(4, 8), ints(8, 4)))
add("MultiLabelMarginLoss", nn.MultiLabelMarginLoss, lambda: (torch.randn(4, 8), ints(8, 4, 8)))
add(
    "MultiLabelSoftMarginLoss",
    nn.MultiLabelSoftMarginLoss,
    lambda: (torch.randn(4, 8), ints(2, 4, 8).float()),
)
add("GaussianNLLLoss", nn.GaussianNLLLoss, lambda: (*floats((4, 8), (4, 8))(), torch.rand(4, 8)))
add(
    "CTCLoss",
    nn.CTCLoss,
    lambda: (torch.randn(6, 2, 4).log_softmax(-1), ints(3, 2, 3) + 1, (6, 5), (3, 2)),
)
add(
    "CTCLoss lengths in tensors",
    nn.CTCLoss,
    lambda: (
        torch.randn(6, 2, 4).log_softmax(-1),
        ints(3, 2, 3) + 1,
        torch.tensor([6, 5]),
        ints(3, 2) + 1,
    ),
)
add(
    "AdaptiveLogSoftmaxWithLoss",
    lambda: nn.AdaptiveLogSoftmaxWithLoss(8, 12, [4]),
    lambda: (torch.randn(4, 8), ints(12, 4)),
)
if hasattr(nn, "LinearCrossEntropyLoss"):  # from torch 2.13 on
    add(
        "LinearCrossEntropyLoss",
        lambda: nn.LinearCrossEntropyLoss(8, 5),
        lambda: (torch.randn(4, 8), ints(5, 4)),
    )

# --- attention ------------------------------------------------------------------------------------


def with_arguments(module: nn.Module, *order: str) -> nn.Module:
    """The module with its keyword arguments by position."""

    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = module

        def forward(self, *values: Any) -> Any:
            return self.inner(**dict(zip(order, values, strict=True)))

    return Named()


def attention(*order: str, **options: Any) -> Callable[[], nn.Module]:
    """nn.MultiheadAttention of one sequence to itself."""

    class SelfAttention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.need_weights = options.pop("need_weights", True)
            self.inner = nn.MultiheadAttention(8, 2, **options)

        def forward(self, x: Tensor, *values: Any) -> Any:
            named = dict(zip(order, values, strict=True))
            return self.inner(x, x, x, need_weights=self.need_weights, **named)

    return SelfAttention


for weights in (True, False):
    for first in (True, False):
        batch = (3, 5, 8) if first else (5, 3, 8)
        options = {"need_weights": weights, "batch_first": first}
        suffix = f"{'weights' if weights else 'no weights'} {'batch' if first else 'length'} first"
        add(f"MultiheadAttention {suffix}", attention(**options), floats(batch))
        for mask_name, mask in (("ragged", ragged), ("holes", holes)):
            add(
                f"MultiheadAttention {mask_name} {suffix}",
                attention("key_padding_mask", **options),
                lambda b=batch, m=mask: (torch.randn(b), m()),
            )
        add(
            f"MultiheadAttention causal {suffix}",
            attention("attn_mask", **options),
            lambda b=batch: (torch.randn(b), causal()),
        )
        add(
            f"MultiheadAttention causal and ragged {suffix}",
            attention("attn_mask", "key_padding_mask", **options),
            lambda b=batch: (torch.randn(b), causal().isinf(), ragged()),
        )
add("MultiheadAttention dropout", attention(dropout=0.5, batch_first=True), floats((3, 5, 8)))
add("MultiheadAttention bias_kv", attention(add_bias_kv=True), floats((5, 3, 8)))
add("MultiheadAttention add_zero_attn", attention(add_zero_attn=True), floats((5, 3, 8)))
add("MultiheadAttention no bias", attention(bias=False, batch_first=True), floats((3, 5, 8)))
add(
    "MultiheadAttention",
    lambda: nn.MultiheadAttention(8, 2, kdim=6, vdim=7, batch_first=True),
    floats((3, 5, 8), (3, 4, 6), (3, 4, 7)),
)


def encoder_layer(**options: Any) -> nn.TransformerEncoderLayer:
    settings = {"batch_first": True, "dropout": 0.1, **options}
    return nn.TransformerEncoderLayer(8, 2, 16, **settings)


def encoder(*, nested: bool = True, **options: Any) -> nn.TransformerEncoder:
    return nn.TransformerEncoder(encoder_layer(**options), 2, enable_nested_tensor=nested)


ENCODER_MASKS: dict[str, Inputs] = {
    "src": floats((3, 5, 8)),
    "src src_key_padding_mask": lambda: (torch.randn(3, 5, 8), ragged()),
    "src mask": lambda: (torch.randn(3, 5, 8), causal()),
    "src mask src_key_padding_mask": lambda: (torch.randn(3, 5, 8), causal().isinf(), ragged()),
}
for order, inputs in ENCODER_MASKS.items():
    names = order.split()
    layer_names = [name.replace("mask", "src_mask") if name == "mask" else name for name in names]
    for option, settings in {
        "": {},
        " norm first": {"norm_first": True},
        " gelu": {"activation": "gelu"},
        " length first": {"batch_first": False},
        " no dropout": {"dropout": 0.0},
    }.items():
        if option == " length first" and len(names) > 1:
            continue
        add(
            f"TransformerEncoderLayer{option} {order}",
            lambda n=layer_names, s=settings: with_arguments(encoder_layer(**s), *n),
            inputs,
        )
        for nested in (True, False):
            add(
                f"TransformerEncoder{option}{' nested' if nested else ''} {order}",
                lambda n=names, s=settings, e=nested: with_arguments(encoder(nested=e, **s), *n),
                inputs,
            )
add(
    "TransformerEncoder nested holes",
    lambda: with_arguments(encoder(), "src", "src_key_padding_mask"),
    lambda: (torch.randn(3, 5, 8), holes()),
)
add(
    "TransformerEncoder said to be causal",
    lambda: with_arguments(encoder(), "src", "mask", "is_causal"),
    lambda: (torch.randn(3, 5, 8), causal(), True),
)
add(
    "TransformerDecoderLayer",
    lambda: nn.TransformerDecoderLayer(8, 2, 16, batch_first=True),
    floats((3, 5, 8), (3, 4, 8)),
)
add(
    "TransformerDecoder",
    lambda: with_arguments(
        nn.TransformerDecoder(nn.TransformerDecoderLayer(8, 2, 16, batch_first=True), 2),
        *("tgt", "memory", "tgt_mask", "memory_key_padding_mask", "tgt_is_causal"),
    ),
    lambda: (*floats((3, 5, 8), (3, 4, 8))(), causal(), ragged(3, 4), True),
)
add(
    "Transformer",
    lambda: with_arguments(
        nn.Transformer(8, 2, 2, 2, 16, batch_first=True),
        *("src", "tgt", "tgt_mask", "tgt_is_causal", "memory_key_padding_mask"),
    ),
    lambda: (*floats((3, 4, 8), (3, 5, 8))(), causal(), True, ragged(3, 4)),
)

# --- modules whose weights are computed -----------------------------------------------------------

add("weight_norm", lambda: parametrizations.weight_norm(nn.Linear(8, 5)), ROWS)
add("spectral_norm", lambda: parametrizations.spectral_norm(nn.Linear(8, 5)), ROWS)
add("orthogonal", lambda: parametrizations.orthogonal(nn.Linear(8, 8)), ROWS)


class Symmetric(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight.triu() + weight.triu(1).transpose(-1, -2)


def symmetric() -> nn.Module:
    linear = nn.Linear(8, 8)
    parametrize.register_parametrization(linear, "weight", Symmetric())
    return linear


add("parametrize", symmetric, ROWS)

# --------------------------------------------------------------------------------------------------

# Containers and bases, which cannot be called.
NOT_CALLED = {
    *("Module", "Container", "ModuleDict", "ModuleList", "ParameterDict", "ParameterList"),
    *("RNNBase", "RNNCellBase"),
}
ITEM = "aten._local_scalar_dense.default"
NESTED = "aten._nested_tensor_from_mask_left_aligned.default"
TRAINING_ONLY = {"BatchNorm1d average": ITEM}  # counts its batches on the host


def refused_by(name: str, *, training: bool) -> str | None:
    """The operator for which the CPU backend refuses a module. All other modules must be right."""
    kind, words = name.split()[0], name.split()[1:]
    if kind == "CTCLoss":
        return f"aten._ctc_loss.{'Tensor' if words else 'default'}"
    if kind == "AdaptiveLogSoftmaxWithLoss":
        return "aten.nonzero.default"
    if kind == "GaussianNLLLoss":
        return ITEM  # checks that no variance is negative
    if kind == "TransformerEncoder":
        masked = "src_key_padding_mask" in words or "holes" in words
        # On its fast path it creates a nested tensor whose shape depends on the mask.
        if not training and masked and "nested" in words and "norm" not in words:
            return NESTED
        return ITEM if "mask" in words else None  # checks whether the mask is causal
    return TRAINING_ONLY.get(name) if training else None


# On CUDA recurrent layers point a tensor at their weights, and a matrix exponential reads its norm.
REFUSED_ON_CUDA = ("RNN", "GRU", "LSTM", "orthogonal")
# cuDNN sums its result in the order in which its blocks finish.
IN_ANY_ORDER_ON_CUDA = {"ConvTranspose3d"}


def is_refused_on_cuda(name: str) -> bool:
    return name.startswith(REFUSED_ON_CUDA) and "Cell" not in name


# Only for the GPU.
NOT_IN_TRAINING = {"SyncBatchNorm"}
MODES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "no_grad": torch.no_grad,
    "inference": torch.inference_mode,
}


def to(device: torch.device, values: tuple[Any, ...]) -> list[Any]:
    return [value.to(device) if isinstance(value, Tensor) else value for value in values]


def cloned(values: list[Any]) -> list[Any]:
    return [value.clone() if isinstance(value, Tensor) else value for value in values]


def assert_same(actual: Any, expected: Any, rounding: float = 0) -> None:
    torch.testing.assert_close(actual, expected, rtol=rounding, atol=rounding, equal_nan=True)


def test_every_module_of_torch_is_here() -> None:
    modules = {
        name
        for name, value in vars(nn).items()
        if isinstance(value, type) and issubclass(value, nn.Module)
    }
    assert modules - NOT_CALLED - {name.split()[0] for name in CASES} == set()


@pytest.mark.sweep
@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", CASES)
def test_a_module_does_in_a_graph_what_it_does_eagerly(
    pool: GraphPool, device: torch.device, name: str, mode: str, training: bool
) -> None:
    if training and (device.type == "cuda" or name in NOT_IN_TRAINING):
        pytest.skip("random numbers of a CUDA graph are others than eager's; or not on the CPU")
    if name == "DataParallel" and torch.cuda.is_available() and device.type == "cpu":
        pytest.skip("it takes modules on the first GPU only where there is one")
    rounding = 1e-5 if device.type == "cuda" and name in IN_ANY_ORDER_ON_CUDA else 0
    make, inputs = CASES[name]
    static = to(device, inputs())
    module = make().to(device)
    module(*cloned(static))  # lazy modules get their parameters, CUDA libraries their first call
    module.train(training)
    reference = copy.deepcopy(module)
    with MODES[mode]():
        reference(*cloned(static))  # as a warm-up does
        module(*cloned(static))
        module.load_state_dict(copy.deepcopy(reference.state_dict()))
        torch.manual_seed(1)
        before = cloned(static)
        refused = refused_by(name, training=training)
        if refused is not None or (device.type == "cuda" and is_refused_on_cuda(name)):
            with pytest.raises(CaptureError) as caught:
                pool.capture(lambda: module(*static), collect_garbage=False)
            assert device.type == "cuda" or caught.value.operator == refused
            return
        captured = pool.capture(lambda: module(*static), collect_garbage=False)
        torch.manual_seed(1)
        assert_same(captured.output, reference(*before), rounding)
        for seed in (2, 3):
            for old, new in zip(static, to(device, inputs()), strict=True):
                if isinstance(old, Tensor):
                    old.copy_(new)
            fresh = cloned(static)
            torch.manual_seed(seed)
            pool.replay(captured.tape)
            torch.manual_seed(seed)
            assert_same(captured.output, reference(*fresh), rounding)
            assert_same(static, fresh)
            assert_same(module.state_dict(), reference.state_dict())
