"""The functions of the CUDA runtime taken from CUDA's Python bindings.

The bindings come with CUDA builds of torch. Without them graphs do not report their node count, and
captures run on streams that torch may also hand out to other code.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from ostinato.errors import CaptureError

try:
    from cuda.bindings import runtime
except ImportError:
    runtime = None

HAS_BINDINGS = runtime is not None


def count_nodes(graph: torch.cuda.CUDAGraph) -> int:
    """Number of nodes in a graph captured with ``keep_graph``."""
    handle = runtime.cudaGraph_t(init_value=graph.raw_cuda_graph())
    status, _, count = runtime.cudaGraphGetNodes(handle)
    if int(status) != 0:
        raise CaptureError(f"cudaGraphGetNodes failed with {status} on a graph just captured")
    return int(count)


def node_counter(stream: torch.cuda.Stream) -> Callable[[], int] | None:
    """Counts the nodes of the graph being captured on ``stream``; None if it cannot be read."""
    if runtime is None:
        return None
    status, *info = runtime.cudaStreamGetCaptureInfo(stream.cuda_stream)
    graphs = [each for each in info if isinstance(each, runtime.cudaGraph_t)]
    if int(status) != 0 or not graphs:
        return None
    get_nodes, graph = runtime.cudaGraphGetNodes, graphs[0]
    return lambda: int(get_nodes(graph)[2])


def own_stream(device: torch.device) -> torch.cuda.Stream:
    """A stream that no other code is given. It lives as long as the process.

    ``torch.cuda.Stream()`` hands out 32 streams in rotation, so a user might get ours too, and the
    user's kernels would then share the cuBLAS workspace of our graphs.
    """
    if runtime is None:
        return torch.cuda.Stream(device)
    with torch.cuda.device(device):
        status, stream = runtime.cudaStreamCreateWithFlags(runtime.cudaStreamNonBlocking)
    if int(status) != 0:
        raise CaptureError(f"cudaStreamCreateWithFlags failed with {status} on {device}")
    return torch.cuda.ExternalStream(int(stream), device=device)
