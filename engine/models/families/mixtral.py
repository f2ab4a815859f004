"""Mixtral (arXiv 2401.04088): Mistral with experts in all layers."""

from __future__ import annotations

import re

from engine.models.decoder import Decoder
from engine.models.experts import read_experts
from engine.models.settings import DecoderSettings
from engine.models.windows import uniform_windows
from engine.text.config import Config

#: The names of an expert's matrices in Mixtral's checkpoints, and the engine's.
_MATRICES = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
_EXPERT = re.compile(r"(\.experts\.\d+\.)(w[123])(\.)")


class Mixtral(Decoder):
    @staticmethod
    def read(config: Config) -> DecoderSettings:
        experts = read_experts(config, config.integer("intermediate_size"), count=8, normed=True)
        return DecoderSettings.read(config, windows=uniform_windows(config), experts=experts)

    def canonical(self, name: str) -> str | None:
        name = name.replace(".block_sparse_moe.", ".mlp.")
        return super().canonical(_EXPERT.sub(lambda found: found[1] + _MATRICES[found[2]] + found[3], name))
