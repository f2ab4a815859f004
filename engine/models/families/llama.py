"""Llama (arXiv 2302.13971, 2407.21783), as transformers' LlamaForCausalLM lays it out."""

from __future__ import annotations

from engine.models.decoder import Decoder
from engine.models.settings import DecoderSettings
from engine.text.config import Config


class Llama(Decoder):
    @staticmethod
    def read(config: Config) -> DecoderSettings:
        bias = config.flag("attention_bias")
        return DecoderSettings.read(config, qkv_bias=bias, output_bias=bias, mlp_bias=config.flag("mlp_bias"))
