"""Qwen2 and 2.5 (arXiv 2407.10671, 2412.15115): Llama with biases on q, k and v, and windows in the later layers."""

from __future__ import annotations

from engine.models.decoder import Decoder
from engine.models.settings import DecoderSettings
from engine.models.windows import qwen_windows
from engine.text.config import Config


class Qwen2(Decoder):
    @staticmethod
    def read(config: Config) -> DecoderSettings:
        return DecoderSettings.read(config, qkv_bias=True, windows=qwen_windows(config))
