"""Phi-3 and Phi-4 (arXiv 2404.14219, 2503.01743), dense: fused projections, LongRoPE, partial rotary embedding."""

from __future__ import annotations

from engine.models.decoder import Decoder
from engine.models.settings import DecoderSettings
from engine.models.windows import uniform_windows
from engine.text.config import Config


class Phi3(Decoder):
    @staticmethod
    def read(config: Config) -> DecoderSettings:
        rope = config.rope()
        kind = rope.text("rope_type")
        # A Phi-3's "yarn" has always meant LongRoPE; transformers reads it so, too.
        if kind not in ("default", "longrope", "su", "yarn"):
            raise rope.wrong("rope_type", "is not supported for Phi-3; 'default' and 'longrope' are")
        if kind == "yarn":
            rope = rope.replaced(rope_type="longrope")
        return DecoderSettings.read(config, fused=True, windows=uniform_windows(config), ropes=(rope,))
