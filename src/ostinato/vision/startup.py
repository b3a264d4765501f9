"""Start-up of what a model needs for images: the encoder's graphs, and room for their rows."""

from __future__ import annotations

from ostinato.config import EngineConfig
from ostinato.graphs.policy.plan import CapturePlan
from ostinato.models.base import CausalLM
from ostinato.models.hf.vision.vision_language import VisionLM
from ostinato.vision.image_inputs import ImageInputs
from ostinato.vision.vision_runner import VisionRunner

# Rows of images that are kept, in steps' worth of tokens.
_KEPT_STEPS = 2


def build_image_inputs(config: EngineConfig, model: CausalLM, plan: CapturePlan) -> ImageInputs:
    """Capture the encoder's graphs, and allocate for the steps of ``plan``."""
    assert isinstance(model, VisionLM), "no other model uses M-RoPE"
    runner = VisionRunner(
        model.vision,
        config.vision_capture_sizes(model.device),
        graphs=config.graphs,
        show_progress=config.show_progress,
    )
    try:
        runner.capture()
    except BaseException:
        runner.close()
        raise
    most = plan.padded_tokens(plan.max_num_batched_tokens)
    return ImageInputs(model, runner, max_num_tokens=most, max_cached_tokens=_KEPT_STEPS * most)
