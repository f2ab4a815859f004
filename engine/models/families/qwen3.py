"""Qwen3 (arXiv 2505.09388), its dense models: queries and keys are normed head by head."""

from __future__ import annotations

from engine.models.decoder import Decoder
from engine.models.settings import DecoderSettings
from engine.models.windows import qwen_windows
from engine.text.config import Config


class Qwen3(Decoder):
    @staticmethod
    def read(config: Config) -> DecoderSettings:
        bias = config.flag("attention_bias")
        return DecoderSettings.read(config, qkv_bias=bias, output_bias=bias, qk_norm=True, windows=qwen_windows(config))
