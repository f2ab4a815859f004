"""Mistral (arXiv 2310.06825): Llama; the first version has a window in all layers."""

from __future__ import annotations

from engine.models.decoder import Decoder
from engine.models.settings import DecoderSettings
from engine.models.windows import uniform_windows
from engine.text.config import Config


class Mistral(Decoder):
    @staticmethod
    def read(config: Config) -> DecoderSettings:
        return DecoderSettings.read(config, windows=uniform_windows(config))
