"""Gemma 3's text model (arXiv 2503.19786): five of six layers have a window and their own rope; q and k are normed."""

from __future__ import annotations

from engine.models.decoder import Decoder
from engine.models.families.gemma2 import GemmaLayer, gemma_traits
from engine.models.settings import DecoderSettings
from engine.models.windows import mixed_windows
from engine.text.config import MOST_LAYERS, Config

#: The decoder's name prefixes in checkpoints with images (transformers 5 in memory, and on disk), and the engine's.
_DECODER = {"model.language_model.": "model.", "language_model.model.": "model.", "language_model.lm_head.": "lm_head."}
#: The prefixes of other tensors in such checkpoints, which are skipped.
_VISION = ("vision_tower.", "multi_modal_projector.", "model.vision_tower.", "model.multi_modal_projector.")


class Gemma3(Decoder):
    LAYER = GemmaLayer

    @staticmethod
    def read(config: Config) -> DecoderSettings:
        if "attn_logit_softcapping" in config:
            raise config.wrong("attn_logit_softcapping", "is not supported: Gemma 3's attention has no such cap")
        layers = config.integer("num_hidden_layers", high=MOST_LAYERS)
        period = config.integer("sliding_window_pattern", high=MOST_LAYERS)
        return DecoderSettings.read(
            config,
            windows=mixed_windows(config, [(i + 1) % period != 0 for i in range(layers)]),
            ropes=(config.rope("full_attention"), config.rope("sliding_attention")),
            qk_norm=True,
            **gemma_traits(config),
        )

    def canonical(self, name: str) -> str | None:
        if name.startswith(_VISION):
            return None
        for theirs, ours in _DECODER.items():
            if name.startswith(theirs):
                return super().canonical(ours + name.removeprefix(theirs))
        return super().canonical(name)
