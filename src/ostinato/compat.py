"""Every private name of torch, Triton and transformers that Ostinato uses.

Each entry says what the name is for, where it was seen, and what happens without it. A missing name
breaks no import: its replacement is slower, does less, or raises when it is used.
``ostinato doctor`` lists them all.
"""

from __future__ import annotations

import importlib
import logging
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch.overrides import enable_reentrant_dispatch

from ostinato.errors import ConfigError

logger = logging.getLogger(__name__)

_TORCH = "torch 2.11 and 2.13"
_TRITON = "3.6."  # prefix of the supported versions


@dataclass(frozen=True, kw_only=True)
class PrivateName:
    """One private name: its location, its purpose, and what happens without it."""

    path: str
    purpose: str
    without: str
    seen_in: str

    def find(self) -> Any:
        """The object, or None if it is missing."""
        parts = self.path.split(".")
        found: Any = None
        for count in range(len(parts), 0, -1):
            try:
                found = importlib.import_module(".".join(parts[:count]))
            except Exception:  # missing, or broken here: some of torch's need a UTF-8 locale
                continue
            try:
                return _inside(found, parts[count:])
            except ImportError:  # from transformers' stand-in for what needs another package
                return None
        return None

    def demand(self) -> Any:
        """The object; raises if it is missing."""
        found = self.find()
        if found is None:
            self.refuse()
        return found

    def refuse(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Replaces an object that has no substitute; always raises."""
        package = self.path.partition(".")[0]
        raise ConfigError(
            f"{self.path} is missing in this {package} ({_version(package)}), and without it "
            f"{self.without}; use a version that has it, such as {self.seen_in}"
        )


def _inside(found: Any, parts: list[str]) -> Any:
    for part in parts:
        if not hasattr(found, part) and part not in getattr(found, "__annotations__", ()):
            return None
        value = getattr(found, part, None)
        found = part if value is None else value  # None, or an attribute of instances only
    return found


private_names: list[PrivateName] = []


def _name(path: str, *, purpose: str, without: str, seen_in: str = _TORCH) -> PrivateName:
    name = PrivateName(path=path, purpose=purpose, without=without, seen_in=seen_in)
    private_names.append(name)
    return name


def _private(path: str, instead: Any = None, **about: str) -> Any:
    """The object at ``path``, or ``instead``; if that is None, a stand-in that raises when used."""
    name = _name(path, **about)
    found = name.find()
    if found is None:
        return name.refuse if instead is None else instead
    return found


def _version(package: str) -> str:
    return str(getattr(importlib.import_module(package), "__version__", "of no version"))


# --- operators and dispatch ---------------------------------------------------------------------

if TYPE_CHECKING:
    from torch._ops import OpOverload as OpOverload
    from torch._ops import OpOverloadPacket as OpOverloadPacket
    from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
else:

    class _NoSuchClass:
        """A class without instances, so that isinstance() is always false."""

        def __init__(self) -> None:
            raise ConfigError(
                f"torch {torch.__version__} has no dispatch modes, which captures need; use a "
                f"version that has them, such as {_TORCH}"
            )

    _operators = {
        "purpose": "distinguishes operators from other callables, and reads their schema",
        "without": "captures reject every operator as unknown",
    }
    OpOverload = _private("torch._ops.OpOverload", _NoSuchClass, **_operators)
    OpOverloadPacket = _private("torch._ops.OpOverloadPacket", _NoSuchClass, **_operators)
    TorchDispatchMode = _private(
        "torch.utils._python_dispatch.TorchDispatchMode",
        _NoSuchClass,
        purpose="captures and trials watch each operator that runs",
        without="nothing can be captured",
    )

_composite_key: Any = _private(
    "torch._C.DispatchKey.CompositeImplicitAutograd",
    0,
    purpose="decomposes composite operators, so that each part is watched",
    without="composite operators cannot be captured",
)
_name(
    "torch.ops.aten.mm.default._op_dk",
    purpose="runs one kernel of an operator: its composite implementation",
    without="composite operators cannot be captured",
)


_name(
    "torch.ops.aten.mm.default._schema",
    purpose="tells which arguments an operator has, and which of them it writes",
    without="nothing can be captured",
)
_name(
    "torch.utils._python_dispatch.TorchDispatchMode._should_skip_dynamo",
    purpose="watching operators does not import torch.compile",
    without="the first capture or trial takes two seconds longer",
)
_name(
    "torch._dynamo.trace_rules.add",
    purpose="torch.compile leaves the code of captures alone",
    without="captures inside a compiled function may fail",
)


def call_composite(operator: OpOverload, args: Any, kwargs: Any) -> Any:
    """Run an operator's composite implementation.

    Not ``operator.decompose()``, which prefers Python decompositions written for tracing to the
    kernel that runs eagerly: bilinear upsampling and recurrent layers round differently there.
    """
    return operator._op_dk(_composite_key, *args, **kwargs)


has_kernel_for_key: Callable[[str, str], bool] = _private(
    "torch._C._dispatch_has_kernel_for_dispatch_key",
    purpose="tells whether an operator is composite",
    without="composite operators cannot be captured",
)

# Both are left in C++, where Ctrl-C cannot keep them from being left. Such a guard restores all
# layers that operators pass; ending late, it would turn them off, or end the process.
inference_mode: Callable[[bool], AbstractContextManager[object]] = _private(
    "torch._C._InferenceMode",
    torch.inference_mode,
    purpose="switches inference mode around tensors that are made in a capture",
    without="the public class takes a microsecond longer, and an interrupt may keep it on",
)
layers_above_modes: Callable[[], AbstractContextManager[object]] = _private(
    "torch._C._RestorePythonTLSSnapshot",
    enable_reentrant_dispatch,
    purpose="parts of composite operators pass autocast and views, as in eager code",
    without="the public function does the same, but an interrupt may end the process",
)

inside_functorch_transform: Callable[[], Any] = _private(
    "torch._C._functorch.peek_interpreter_stack",
    lambda: None,
    purpose="graphed() refuses calls inside vmap, grad and similar transforms",
    without="such a call fails with one of torch's own errors",
)

function_stack_depth: Callable[[], int] = _private(
    "torch._C._len_torch_function_stack",
    lambda: 0,
    purpose="function modes (`with torch.device(...)`) are part of the key of graphed()",
    without="a graph may be replayed under a function mode other than the one at capture",
)
function_mode_at: Callable[[int], Any] = _private(
    "torch._C._get_function_stack_at",
    purpose="the settings of a function mode are part of the key too",
    without="calls under a function mode are refused",
)

_modes = {
    "purpose": "torch's modes that an interrupt left on are left when a call ends",
    "without": "they stay on, and may refuse every later operator of the thread",
}
_dispatch_stack_depth: Callable[[], int] = _private(
    "torch._C._len_torch_dispatch_stack", lambda: 0, **_modes
)
_dispatch_mode_at: Callable[[int], Any] = _private("torch._C._get_dispatch_stack_at", **_modes)
_pop_dispatch_mode: Callable[[Any], Any] = _private("torch._C._pop_torch_dispatch_stack", **_modes)
pop_function_mode: Callable[[], Any] = _private("torch._C._pop_torch_function_stack", **_modes)


def dispatch_modes() -> list[Any]:
    """The dispatch modes of this thread, innermost last."""
    return [_dispatch_mode_at(index) for index in range(_dispatch_stack_depth())]


def function_modes() -> list[Any]:
    """The function modes of this thread, innermost last."""
    return [function_mode_at(index) for index in range(function_stack_depth())]


def pop_dispatch_mode() -> None:
    """Take the innermost dispatch mode off this thread's stack, and do no more."""
    _pop_dispatch_mode(None)


_mode_flags = [
    _name(f"torch.utils._python_dispatch.{name}", **_modes)
    for name in (
        "_is_in_torch_dispatch_mode",
        "_is_in_non_infra_torch_dispatch_mode",
        "_is_in_any_mode_without_ignore_compile_internals",
    )
]
_set_flag_of_compiler = _name(
    "torch._C._dynamo.guards.set_is_in_mode_without_ignore_compile_internals", **_modes
)


def reset_mode_flags() -> None:
    """Note that no dispatch mode is on. Otherwise torch.compile leaves all functions alone."""
    module: Any = sys.modules["torch.utils._python_dispatch"]
    for flag in _mode_flags:
        name = flag.path.rpartition(".")[2]
        if hasattr(module, name):
            setattr(module, name, False)
    set_flag = _set_flag_of_compiler.find()
    if set_flag is not None:
        set_flag(False)


generated_functions: list[Any] = [
    _private(
        f"torch._C.{module}",
        object(),
        purpose="CPU replays call operators through the shortest path",
        without="CPU replays take a few microseconds longer per operator",
    )
    for module in ("_VariableFunctions", "_nn", "_linalg")
]

record_function: Callable[[str], Any] = _private(
    "torch._C._profiler._RecordFunctionFast",
    lambda name: nullcontext(),
    purpose="profilers see the Python kernels of CPU replays",
    without="profilers do not see them",
)


def replaceable(path: str) -> Any:
    """The object at ``path``, for replacing functions in it; an empty object if it is missing."""
    found = _name(
        path,
        purpose="CPU recordings refuse tensor reads that dispatch no operator",
        without="reads that go through it are not refused",
    ).find()
    return object() if found is None else found


_scriptable = _name(
    "torch.jit._builtins._builtin_table",
    purpose="TorchScript compiles calls of the torch functions that CPU recordings replace",
    without="it takes those functions for Python functions, and may refuse code that calls them",
)


def keep_scriptable(original: Any, replacement: Any) -> None:
    """Have TorchScript treat ``replacement`` as it treats ``original``.

    It lists torch's functions when it is first used, and finds ``replacement`` there afterwards.
    """
    table = _scriptable.find()
    if isinstance(table, dict) and id(original) in table:
        table[id(replacement)] = table[id(original)]


_parametrization_cache = _name(
    "torch.nn.utils.parametrize._cache",
    purpose="captures under torch.nn.utils.parametrize.cached() are refused",
    without="such a graph keeps the weights that were cached, whatever their parts are later",
)


def parametrized_weights_are_cached() -> bool:
    """Whether weights were computed and kept under ``torch.nn.utils.parametrize.cached()``."""
    return bool(_parametrization_cache.find())


forward_hooks: list[dict[int, Any]] = [
    _private(
        f"torch.nn.modules.module.{name}",
        {},
        purpose="global module hooks added after a capture are detected",
        without="they are not detected",
    )
    for name in ("_global_forward_hooks", "_global_forward_pre_hooks")
]

for _table in ("_parameters", "_buffers", "_modules", "_forward_hooks", "_forward_pre_hooks"):
    _name(
        f"torch.nn.Module.{_table}",
        purpose="graphed() notices what was replaced in a module, or hooked to it",
        without="graphed() takes no modules",
    )

flash_attention: Any = _name(
    "torch.ops.aten._flash_attention_forward",
    purpose="attention over packed sequences in one kernel, for encoders on CUDA",
    without="sequences of each length take kernels of their own",
).find()

demangle: Callable[[str], str] = _private(
    "torch._C._demangle",
    lambda name: name,
    purpose="the ledger shows the names of C++ kernels as they are written",
    without="it shows them as the linker sees them",
)

# --- tensors and their memory -------------------------------------------------------------------

has_internal_overlap: Callable[[torch.Tensor], Any] = _private(
    "torch._debug_has_internal_overlap",
    lambda tensor: any(
        stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True)
    ),
    purpose="CPU recordings copy expanded tensors in full",
    without="strides are checked instead, which misses overlaps other than expansion",
)

neg_view: Callable[[torch.Tensor], torch.Tensor] = _private(
    "torch._neg_view",
    purpose="lazily negated results keep that property",
    without="such results cannot be captured",
)

is_zerotensor: Callable[[torch.Tensor], bool] = _private(
    "torch.Tensor._is_zerotensor",
    lambda tensor: False,
    purpose="captures refuse the zeros of torch.func.jvp, which have no memory",
    without="such a tensor fails with one of torch's own errors",
)

storage_from_address: Callable[[int, torch.device, int], Any] = _private(
    "torch._C._construct_storage_from_data_pointer",
    purpose="outputs of CUDA graphs are held without reserving their memory",
    without="CUDA graphs cannot share memory, so nothing is captured",
)

compare_addresses: Any = _private(
    "torch._C._tensors_data_ptrs_at_indices_equal",
    0,  # falsy, and checked before the call; CPU builds lack the function
    purpose="one call detects all weights that moved",
    without="weights are checked one by one (CPU builds of torch; about 20 us for 300)",
    seen_in="CUDA builds of torch 2.1 to 2.13",
)


def storage_number(storage: torch.UntypedStorage) -> int:
    """A number that identifies a storage; tensors that share it get the same number."""
    number: int = getattr(storage, "_cdata", None) or storage.data_ptr()
    return number


_name(
    "torch.UntypedStorage._cdata",
    purpose="tells whether tensors share memory",
    without="the address of the memory is used instead",
)


def generator_number(generator: torch.Generator) -> int:
    """A number that identifies a generator; its Python object differs on every dispatch."""
    number: int = getattr(generator, "_cdata", None) or id(generator)
    return number


_name(
    "torch.Generator._cdata",
    purpose="captures recognize the registered generators",
    without="draws from registered generators are refused",
)

# --- CUDA ---------------------------------------------------------------------------------------

raw_stream: Callable[[int], int] = _private(
    "torch._C._cuda_getCurrentRawStream",
    lambda index: torch.cuda.current_stream(index).cuda_stream,
    purpose="every replay and launch reads the current stream",
    without="the public function takes a few microseconds longer",
    seen_in="CUDA builds of torch 2.11 and 2.13",
)

current_device: Callable[[], int] = _private(
    "torch._C._cuda_getDevice",
    torch.cuda.current_device,
    purpose="every launch reads the current device",
    without="the public function takes a microsecond longer",
    seen_in="CUDA builds of torch 2.11 and 2.13",
)

end_allocate_to_pool: Callable[[int, Any], None] = _private(
    "torch._C._cuda_endAllocateToPool",
    purpose="restores the allocator after a broken capture",
    without="a process cannot continue after a broken capture",
    seen_in="CUDA builds of torch 2.11 and 2.13",
)
release_pool: Callable[[int, Any], None] = _private(
    "torch._C._cuda_releasePool",
    purpose="releases the memory of a broken capture",
    without="a process cannot continue after a broken capture",
    seen_in="CUDA builds of torch 2.11 and 2.13",
)

memory_snapshot: Callable[[], Any] = _private(
    "torch.cuda.memory._snapshot",
    lambda: {"segments": torch.cuda.memory_snapshot()},
    purpose="tells which memory belongs to a pool",
    without="the public function returns the same information",
)


def answer_for_captures(is_recording: Callable[[], bool]) -> None:
    """Make ``torch.cuda.is_current_stream_capturing()`` true in CPU recordings as well.

    The replacement is permanent, and sits below the public function, so that it also works where
    that one was imported by name. Without CUDA the function raises, and outside recordings it
    still does.
    """
    torch_answers = _stream_is_capturing.find()
    if torch_answers is not None:
        torch.cuda.graphs._cuda_isCurrentStreamCapturing = (  # type: ignore[attr-defined]
            lambda: is_recording() or bool(torch_answers())
        )


_stream_is_capturing = _name(
    "torch.cuda.graphs._cuda_isCurrentStreamCapturing",
    purpose="code that asks whether it is being captured gets the same answer on the CPU",
    without="such code assumes that it runs eagerly, and its first host read is refused",
    seen_in="torch 2.0 to 2.13",
)

# --- torch.distributed --------------------------------------------------------------------------

_default_store = _name(
    "torch.distributed.distributed_c10d._get_default_store",
    purpose="ranks that exist already find each other through their own store",
    without="an engine starts its own ranks only",
)


def default_store() -> Any:
    """The store of torch's process group, which must be initialised."""
    return _default_store.demand()()


_groups = _name(
    "torch.distributed.distributed_c10d._world",
    purpose="a start that failed can be tried again in the same process",
    without="it needs a new process",
)


def forget_failed_groups() -> None:
    """Count process groups from 0 again: torch names them by a counter, failed ones included."""
    groups = _groups.find()
    if groups is not None:
        groups.group_count = 0


# --- switches, read on every call ---------------------------------------------------------------


def _switch(name: str, instead: Callable[[], Any]) -> Callable[[], Any]:
    read: Callable[[], Any] = _private(
        f"torch._C.{name}",
        instead,
        purpose="every call reads a switch that changes results",
        without="the public function takes slightly longer",
    )
    return read


deterministic_algorithms = _switch(
    "_get_deterministic_algorithms", torch.are_deterministic_algorithms_enabled
)
float32_matmul_precision = _switch(
    "_get_float32_matmul_precision", torch.get_float32_matmul_precision
)
cuda_switches: list[Callable[[], Any]] = [
    _switch("_get_cublas_allow_tf32", lambda: torch.backends.cuda.matmul.allow_tf32),
    _switch("_get_cudnn_allow_tf32", lambda: torch.backends.cudnn.allow_tf32),
    _switch(
        "_get_cublas_allow_fp16_reduced_precision_reduction",
        lambda: torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction,
    ),
    _switch(
        "_get_cublas_allow_bf16_reduced_precision_reduction",
        lambda: torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction,
    ),
    _switch("_get_cudnn_enabled", lambda: torch.backends.cudnn.enabled),
    _switch("_get_cudnn_benchmark", lambda: torch.backends.cudnn.benchmark),
    _switch("_get_cudnn_deterministic", lambda: torch.backends.cudnn.deterministic),
    _switch("_get_flash_sdp_enabled", torch.backends.cuda.flash_sdp_enabled),
    _switch("_get_mem_efficient_sdp_enabled", torch.backends.cuda.mem_efficient_sdp_enabled),
    _switch("_get_math_sdp_enabled", torch.backends.cuda.math_sdp_enabled),
    _switch("_get_cudnn_sdp_enabled", torch.backends.cuda.cudnn_sdp_enabled),
]

# --- torch.compile ------------------------------------------------------------------------------

tensor_guards = _name(
    "torch._C._dynamo.guards.TensorGuards",
    purpose="one call checks all arguments of a replay",
    without="they are checked in Python, which takes a few microseconds longer",
)

compile_fx = _name(
    "torch._inductor.compile_fx.compile_fx",
    purpose="GraphConfig(compile=True) compiles the pieces of a model with inductor",
    without="only compile='eager' is available",
)

_stance = {
    "purpose": "compiled functions run eagerly inside CPU captures, and compiled outside of them",
    "without": "once a capture has met torch.compile, compiled functions run eagerly",
}
compile_stance = _name("torch._dynamo.eval_frame._stance", **_stance)
set_compile_stance = _name("torch._dynamo.eval_frame._set_stance", **_stance)

_tracing = {
    "purpose": "GraphConfig(compile=...) traces a model and splits it at attention",
    "without": "GraphConfig(compile=...) is not available",
}
dynamo = _name("torch._dynamo", **_tracing)
constant_source = _name("torch._dynamo.source.ConstantSource", **_tracing)
fake_tensor_mode = _name("torch._subclasses.fake_tensor.FakeTensorMode", **_tracing)

_name("torch.ops.aten.mm._qualified_op_name", **_tracing)

symbolic_shape_settings = _name(
    "torch.fx.experimental._config",
    purpose="a trace also holds for sizes 0 and 1",
    without="GraphConfig(compile=...) is not available",
)

# --- Triton -------------------------------------------------------------------------------------

launch_settings = _name(
    "triton.knobs.runtime",
    purpose="kernels are launched without Triton's own checks of every argument",
    without="every launch takes about 20 us longer, which slows eager steps and captures",
    seen_in=f"Triton {_TRITON}x",
)


@cache
def triton_launches() -> Any:
    """Triton's launch settings, or None for versions whose launcher is not supported.

    Where there is a GPU, such a version is logged once.
    """
    version = importlib.import_module("triton").__version__
    if version.startswith(_TRITON):
        return launch_settings.find()
    if torch.cuda.is_available():
        logger.warning(
            "Triton %s: every launch takes about 20 us longer, models start more slowly, and "
            "kernels written for Hopper are off. Triton %sx has all of them; torch 2.11 comes "
            "with it. `ostinato doctor` lists the fast paths",
            version,
            _TRITON,
        )
    return None


gluon = _name(
    "triton.experimental.gluon",
    purpose="on Hopper, prompts, long contexts and small-M GEMMs have kernels of their own",
    without="they use the kernels for all GPUs; prompts then attend half as fast",
    seen_in=f"Triton {_TRITON}x",
)

_name(
    "triton.experimental.gluon.language.shared_memory_descriptor._reinterpret",
    purpose="those kernels copy pages of the KV cache into one tile",
    without="they do not compile",
    seen_in=f"Triton {_TRITON}x",
)

cache_key = _name(
    "triton.runtime.cache.triton_key",
    purpose="Triton hashes its own files while a model is loaded",
    without="the first kernel waits for that, up to a second",
    seen_in=f"Triton {_TRITON}x",
)

compile_mode = _name(
    "triton.runtime._async_compile.active_mode",
    purpose="start-up compiles Triton kernels side by side",
    without="they are compiled one after another, once per machine: tens of seconds for a model",
    seen_in=f"Triton {_TRITON}x",
)


@cache
def runs_gluon(device: torch.device) -> bool:
    """Whether kernels written in Gluon for Hopper run on ``device``."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device)[0] != 9:
        return False
    return triton_launches() is not None and gluon.find() is not None


def triton_compile_mode() -> Any:
    """Triton's context variable whose value receives each kernel to compile.

    None in versions that are not supported, and where kernels are interpreted.

    Triton calls ``submit(key, compile, finish)`` of that value instead of compiling.
    ``compile()``, in any thread, returns the kernel, from Triton's cache on disk if it is there;
    ``finish(kernel)`` makes launches find it. What ``submit`` returns is returned by ``warmup``.
    """
    settings = triton_launches()
    return None if settings is None or settings.interpret else compile_mode.find()


def build_launcher(kernel: Any) -> None:
    """Build the C function that launches a compiled kernel, into Triton's cache on disk.

    Otherwise its first launch does. Kernels whose arguments have the same types share it.
    """
    driver = importlib.import_module("triton.runtime").driver
    launcher = getattr(driver.active, "launcher_cls", None)
    if launcher is not None:
        launcher(kernel.src, kernel.metadata)


# --- transformers -------------------------------------------------------------------------------

_TRANSFORMERS = "transformers 5.17"

no_init_weights = _name(
    "transformers.initialization.no_init_weights",
    purpose="a model's size is known before its memory is allocated",
    without="models that use transformers' modules cannot be loaded",
    seen_in=_TRANSFORMERS,
)

rope_functions = _name(
    "transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS",
    purpose="frequencies of RoPE variants other than plain and Llama 3's",
    without="models with such a variant cannot be loaded",
    seen_in=_TRANSFORMERS,
)

experts_module = _name(
    "transformers.integrations.moe",
    purpose="mixture-of-experts layers run without reading the routing on the host",
    without="mixture-of-experts models cannot be loaded",
    seen_in=_TRANSFORMERS,
)

quantization_methods = _name(
    "transformers.quantizers.auto.AUTO_QUANTIZATION_CONFIG_MAPPING",
    purpose="tells which quantized checkpoints transformers can read",
    without="quantized checkpoints cannot be loaded",
    seen_in=_TRANSFORMERS,
)

vision_positions = _name(
    "transformers.vision_utils",
    purpose="the positions and windows of an image's patches",
    without="models that take images cannot be loaded",
    seen_in=_TRANSFORMERS,
)

image_processor = _name(
    "transformers.models.qwen2_vl.image_processing_pil_qwen2_vl.Qwen2VLImageProcessorPil",
    purpose="resizes images and cuts them into patches, without torchvision",
    without="images cannot be read (it needs pillow, too: ostinato[images])",
    seen_in=_TRANSFORMERS,
)

_name(
    "transformers.PretrainedConfig._attn_implementation",
    purpose="a model's attention is replaced while it runs",
    without="models that use transformers' modules cannot be loaded",
    seen_in=_TRANSFORMERS,
)

_attention_check = _name(
    "transformers.PreTrainedModel._can_set_attn_implementation",
    purpose="tells whether a model's attention can be replaced",
    without="models that use transformers' modules cannot be loaded",
    seen_in=_TRANSFORMERS,
)


def can_replace_attention(model_class: Any) -> bool:
    """Whether a class of transformers' models calls attention through ``AttentionInterface``."""
    _attention_check.demand()
    return bool(model_class._can_set_attn_implementation())


_name(
    "transformers.PreTrainedModel._keys_to_ignore_on_load_missing",
    purpose="tells which weights a checkpoint may leave out, when some are updated",
    without="update_weights raises for models that use transformers' modules",
    seen_in=_TRANSFORMERS,
)

_name(
    "transformers.PreTrainedModel._is_stateful",
    purpose="tells which models have recurrent layers",
    without="only the types of layers in a config tell",
    seen_in=_TRANSFORMERS,
)

_name(
    "transformers.PreTrainedModel._keys_to_ignore_on_load_unexpected",
    purpose="a checkpoint may hold what transformers ignores",
    without="models that use transformers' modules cannot be loaded",
    seen_in=_TRANSFORMERS,
)

_name(
    "transformers.models.gpt_oss.modeling_gpt_oss.GptOssExperts._apply_gate",
    purpose="every expert runs on every token where torch has no grouped GEMM for it",
    without="mixtures of experts fail there, on their first batch",
    seen_in=_TRANSFORMERS,
)

_name(
    "transformers.models.qwen3_vl_moe.modeling_qwen3_vl_moe.Qwen3VLMoeTextModel._deepstack_process",
    purpose="images enter the layers of Qwen3-VL MoE inside a graph",
    without="Qwen3-VL MoE runs its own, which a graph cannot contain",
    seen_in=_TRANSFORMERS,
)

_name(
    "transformers.CompileConfig._compile_all_devices",
    purpose="`ostinato bench decode` compares with transformers' compiled decoding on the CPU",
    without="that baseline is not compiled",
    seen_in=_TRANSFORMERS,
)
