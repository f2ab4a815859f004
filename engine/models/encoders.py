"""The families of encoders: for each architecture, how its settings are read and its tensors named."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final

from engine.models.encoder import EncoderFamily, EncoderSettings, HeadSettings
from engine.models.settings import RopeSettings
from engine.text.config import MOST_LAYERS, Config
from engine.text.pooling import first_position, label_names, text_length

#: config.json's names of activations -> the engine's.
_ACTIVATIONS: Final = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "silu": "silu",
    "swiglu": "silu",
    "tanh": "tanh",
}
#: Tensors of published checkpoints beside the encoder: heads of the pretraining, positions that need no storage.
_UNUSED: Final = re.compile(
    r"(^|\.)(position_ids|token_type_ids|rotary_emb\.|inv_freq)|^(cls|lm_head|vocab_transform|vocab_layer_norm"
    r"|vocab_projector|decoder|qa_outputs)(\.|$)"
)
#: A pattern and what it becomes, as re.sub takes them.
Rule = tuple[str, str | Callable[[re.Match[str]], str]]


def _activation(config: Config, name: str, default: str) -> str:
    value = config.text(name, default)
    if value not in _ACTIVATIONS:
        raise config.wrong(name, f"is not supported; {', '.join(map(repr, _ACTIVATIONS))} are")
    return _ACTIVATIONS[value]


def _settings(config: Config, **more: Any) -> EncoderSettings:
    """The settings that BERT's descendants have in common. `more`: others, and those that differ."""
    hidden_size, heads = config.integer("hidden_size", 768), config.integer("num_attention_heads", 12)
    if hidden_size % heads:
        raise config.wrong("hidden_size", f"must be a multiple of num_attention_heads={heads}")
    kind = config.text("position_embedding_type", "absolute")
    if kind not in ("absolute", "rope"):
        raise config.wrong("position_embedding_type", "is not supported; 'absolute' is")
    common: dict[str, Any] = {
        "layers": config.integer("num_hidden_layers", 12, high=MOST_LAYERS),
        "hidden_size": hidden_size,
        "heads": heads,
        "vocab_size": config.integer("vocab_size"),
    }
    if "intermediate_size" not in more:
        common["intermediate_size"] = config.integer("intermediate_size", 3072)
    if "context_length" not in more:
        common["context_length"] = config.integer("max_position_embeddings", 512)
    if "norm_eps" not in more:
        common["norm_eps"] = config.number("layer_norm_eps", 1e-12, high=1.0)
    if "activation" not in more:
        common["activation"] = _activation(config, "hidden_act", "gelu")
    return EncoderSettings(**common, **more)


def _bert(config: Config) -> EncoderSettings:
    """BERT (arXiv 1810.04805)."""
    return _settings(
        config,
        token_types=config.integer("type_vocab_size", 2),
        positions=config.integer("max_position_embeddings", 512),
    )


def _roberta(config: Config) -> EncoderSettings:
    """RoBERTa and XLM-R (arXiv 1907.11692, 1911.02116): BERT, whose positions begin after that of the padding."""
    first, length = first_position(config.values), text_length(config.values)
    return replace(_bert(config), first_position=first, context_length=length)


def _mpnet(config: Config) -> EncoderSettings:
    """MPNet (arXiv 2004.09297): RoBERTa with a bias of distances and without token types."""
    buckets = config.integer("relative_attention_num_buckets", 32, low=4, high=1024)
    return replace(_roberta(config), token_types=0, distance_buckets=buckets)


def _distilbert(config: Config) -> EncoderSettings:
    """DistilBERT (arXiv 1910.01108): BERT without token types; its settings have other names."""
    renamed = config.replaced(
        hidden_size=config.integer("dim", 768),
        num_attention_heads=config.integer("n_heads", 12),
        num_hidden_layers=config.integer("n_layers", 6, high=MOST_LAYERS),
        intermediate_size=config.integer("hidden_dim", 3072),
        hidden_act=config.text("activation", "gelu"),
        layer_norm_eps=1e-12,
    )
    return _settings(renamed, positions=config.integer("max_position_embeddings", 512))


def _modernbert(config: Config) -> EncoderSettings:
    """ModernBERT (arXiv 2412.13663): norms before the blocks, rotation, windows in most layers, gated blocks."""
    layers = config.integer("num_hidden_layers", 22, high=MOST_LAYERS)
    every = config.integer("global_attn_every_n_layers", 3, high=MOST_LAYERS)
    kinds = config.get("layer_types") or ["sliding_attention" if i % every else "full_attention" for i in range(layers)]
    if not isinstance(kinds, list) or len(kinds) != layers or {*kinds} - {"full_attention", "sliding_attention"}:
        raise config.wrong("layer_types", f"must be a list of {layers} of 'full_attention', 'sliding_attention'")
    near = [kind == "sliding_attention" for kind in kinds]
    reach = config.integer("local_attention", 128, low=2) // 2
    head_dim = config.integer("hidden_size", 768) // config.integer("num_attention_heads", 12)
    theta = {
        "full_attention": config.number("global_rope_theta", 160_000.0),
        "sliding_attention": config.number("local_rope_theta", 10_000.0),
    }
    bias = config.flag("attention_bias")
    mlp_bias = config.flag("mlp_bias")
    return _settings(
        config,
        intermediate_size=config.integer("intermediate_size", 1152),
        context_length=config.integer("max_position_embeddings", 8192),
        norm_eps=config.number("norm_eps", 1e-5, high=1.0),
        activation=_activation(config, "hidden_activation", "gelu"),
        ropes=tuple(_rope(config, head_dim, kind, default) for kind, default in theta.items()),
        rope_of=tuple(map(int, near)),
        reaches=tuple(reach if slides else None for slides in near),
        pre_norm=True,
        gated=True,
        qkv_bias=bias,
        output_bias=bias,
        up_bias=mlp_bias,
        down_bias=mlp_bias,
        norm_bias=config.flag("norm_bias"),
    )


def _rope(config: Config, head_dim: int, kind: str = "full_attention", theta: float = 10_000.0) -> RopeSettings:
    rope = config.rope(kind)
    return RopeSettings.read(rope if "rope_theta" in rope else rope.replaced(rope_theta=theta), head_dim)


def _nomic(config: Config) -> EncoderSettings:
    """Nomic's BERT (arXiv 2402.01613): rotation, gated blocks, no biases. Its checkpoints name GPT-2's settings,
    those that transformers writes name BERT's."""
    theirs = "n_embd" in config
    if theirs:
        for name, supported in (("prenorm", False), ("rotary_emb_interleaved", False), ("qkv_proj_bias", False)):
            if config.flag(name, supported) is not supported:
                raise config.wrong(name, f"is not supported; {str(supported).lower()} is")
        if config.number("rotary_emb_fraction", 1.0, high=1.0) != 1.0:
            raise config.wrong("rotary_emb_fraction", "is not supported; 1 is")
        inner = config.integer("n_inner", 4 * config.integer("n_embd"))
        config = config.replaced(
            hidden_size=config.integer("n_embd"),
            num_attention_heads=config.integer("n_head"),
            num_hidden_layers=config.integer("n_layer", high=MOST_LAYERS),
            intermediate_size=inner,
            hidden_act=config.text("activation_function", "swiglu"),
            layer_norm_eps=config.number("layer_norm_epsilon", 1e-12, high=1.0),
            max_position_embeddings=config.integer("n_positions", 2048),
            rope_theta=config.number("rotary_emb_base", 1000.0),
        )
    head_dim = config.integer("hidden_size", 768) // config.integer("num_attention_heads", 12)
    return _settings(
        config,
        activation=_activation(config, "hidden_act", "silu"),
        context_length=config.integer("max_position_embeddings", 2048),
        token_types=config.integer("type_vocab_size", 2, low=0),
        ropes=(_rope(config, head_dim, theta=1000.0),),
        rope_of=(0,) * config.integer("num_hidden_layers", 12, high=MOST_LAYERS),
        gated=True,
        qkv_bias=False,
        output_bias=False,
        up_bias=False,
        down_bias=False,
    )


def _gte(config: Config) -> EncoderSettings:
    """GTE (arXiv 2407.19669): BERT with rotation and gated blocks."""
    head_dim = config.integer("hidden_size", 768) // config.integer("num_attention_heads", 12)
    return _settings(
        config,
        context_length=config.integer("max_position_embeddings", 8192),
        token_types=config.integer("type_vocab_size", 1, low=0),
        ropes=(_rope(config, head_dim, theta=160_000.0),),
        rope_of=(0,) * config.integer("num_hidden_layers", 12, high=MOST_LAYERS),
        gated=True,
        up_bias=False,
    )


# ---- names of tensors

_BERT: Final[Sequence[Rule]] = (
    (r"^(bert|roberta|xlm_roberta|mpnet|distilbert|electra)\.", ""),
    (r"\.gamma$", ".weight"),
    (r"\.beta$", ".bias"),
    (r"^embeddings\.word_embeddings\.", "embeddings.words."),
    (r"^embeddings\.position_embeddings\.", "embeddings.positions."),
    (r"^embeddings\.token_type_embeddings\.", "embeddings.token_types."),
    (r"^(embeddings\.LayerNorm|emb_ln)\.", "embeddings.norm."),
    (r"^(encoder|transformer)\.layers?\.", "layers."),
    (r"^encoder\.relative_attention_bias\.", "distances."),
    (r"\.attention\.self\.(query|key|value)\.", lambda m: f".{m[1][0]}."),
    (r"\.attention\.output\.dense\.", ".output."),
    (r"\.attention\.output\.LayerNorm\.", ".attention_norm."),
    (r"\.intermediate\.dense\.", ".up."),
    (r"(layers\.\d+)\.output\.dense\.", r"\1.down."),
    (r"(layers\.\d+)\.output\.LayerNorm\.", r"\1.mlp_norm."),
)
_MPNET: Final[Sequence[Rule]] = (
    *_BERT[:9],
    (r"\.attention\.attn\.([qkv])\.", r".\1."),
    (r"\.attention\.attn\.o\.", ".output."),
    (r"\.attention\.LayerNorm\.", ".attention_norm."),
    *_BERT[12:],
)
_DISTILBERT: Final[Sequence[Rule]] = (
    *_BERT[:8],
    (r"\.attention\.([qkv])_lin\.", r".\1."),
    (r"\.attention\.out_lin\.", ".output."),
    (r"\.sa_layer_norm\.", ".attention_norm."),
    (r"\.ffn\.lin1\.", ".up."),
    (r"\.ffn\.lin2\.", ".down."),
    (r"\.output_layer_norm\.", ".mlp_norm."),
)
_MODERNBERT: Final[Sequence[Rule]] = (
    (r"^model\.", ""),
    (r"^embeddings\.tok_embeddings\.", "embeddings.words."),
    (r"\.attn\.Wqkv\.([qkv])\.", r".\1."),
    (r"\.attn\.Wo\.", ".output."),
    (r"\.attn_norm\.", ".attention_norm."),
    (r"\.mlp\.Wi\.(gate|up)\.", r".\1."),
    (r"\.mlp\.Wo\.", ".down."),
    (r"^final_norm\.", "last_norm."),
)
#: Matrices that checkpoints store as one -> the matrices in it, in order. The names of parts follow its own.
FUSED: Final = {
    "Wqkv": ("q", "k", "v"),
    "qkv_proj": ("q", "k", "v"),
    "Wi": ("gate", "up"),
    "up_gate_proj": ("up", "gate"),
}
#: Renamings of Nomic's and GTE's tensors, from transformers' names and from their own.
_ROTARY: Final[Sequence[Rule]] = (
    (r"^(nomic_bert|gte|new|bert)\.", ""),
    *_BERT[3:8],
    (r"\.self_attn\.([qkv])_proj\.", r".\1."),
    (r"\.(?:attn\.Wqkv|attention\.qkv_proj)\.([qkv])\.", r".\1."),
    (r"\.(self_attn\.o_proj|attn\.out_proj|attention\.o_proj)\.", ".output."),
    (r"\.(post_attention_layernorm|norm1|attn_ln)\.", ".attention_norm."),
    (r"\.(post_mlp_layernorm|norm2|mlp_ln)\.", ".mlp_norm."),
    (r"\.mlp\.(gate_proj|fc12)\.", ".gate."),
    (r"\.mlp\.(up_proj|fc11)\.", ".up."),
    (r"\.mlp\.up_gate_proj\.(gate|up)\.", r".\1."),
    (r"\.mlp\.(down_proj|fc2)\.", ".down."),
)
#: Renamings of the tensors of classifiers' heads.
_POOLER: Final[Sequence[Rule]] = ((r"^pooler\.dense\.", "head.dense."), (r"^classifier\.", "head.labels."))
_OWN_DENSE: Final[Sequence[Rule]] = (
    (r"^classifier\.dense\.", "head.dense."),
    (r"^classifier\.out_proj\.", "head.labels."),
)
_PRE_CLASSIFIER: Final[Sequence[Rule]] = (
    (r"^pre_classifier\.", "head.dense."),
    (r"^classifier\.", "head.labels."),
)
_LABELS: Final[Sequence[Rule]] = ((r"^classifier\.", "head.labels."),)


def _renaming(rules: Sequence[Rule], *, headless: bool) -> Callable[[str], str | None]:
    compiled = [(re.compile(pattern), replacement) for pattern, replacement in rules]
    skipped = re.compile(r"^(pooler|classifier|pre_classifier|head)\.") if headless else None

    def rename(name: str) -> str | None:
        renamed = name
        for pattern, replacement in compiled:
            renamed = pattern.sub(replacement, renamed)
        if _UNUSED.search(renamed) or (skipped is not None and skipped.search(renamed)):
            return None
        # A classifier that does not pool with BERT's pooler may still have one.
        return None if renamed.startswith("pooler.") else renamed

    return rename


def _head(config: Config, activation: str, **more: Any) -> HeadSettings:
    return HeadSettings(len(label_names(config)), activation, **more)


def _modernbert_head(config: Config) -> HeadSettings:
    pooling = config.text("classifier_pooling", "cls")
    if pooling not in ("cls", "mean"):
        raise config.wrong("classifier_pooling", "is not supported; 'cls' and 'mean' are")
    activation = _activation(config, "classifier_activation", "gelu")
    bias = config.flag("classifier_bias")
    return HeadSettings(len(label_names(config)), activation, mean=pooling == "mean", dense_bias=bias, norm=True)


def _token_head(config: Config) -> HeadSettings:
    return HeadSettings(len(label_names(config)), None, tokens=True)


def _modernbert_token_head(config: Config) -> HeadSettings:
    return replace(_modernbert_head(config), mean=False, tokens=True)


def _families() -> dict[str, EncoderFamily]:
    families: dict[str, EncoderFamily] = {}
    for prefix, read, rules, head, head_rules in (
        ("Bert", _bert, _BERT, partial(_head, activation="tanh"), _POOLER),
        ("Roberta", _roberta, _BERT, partial(_head, activation="tanh"), _OWN_DENSE),
        ("XLMRoberta", _roberta, _BERT, partial(_head, activation="tanh"), _OWN_DENSE),
        ("MPNet", _mpnet, _MPNET, partial(_head, activation="tanh"), _OWN_DENSE),
        ("DistilBert", _distilbert, _DISTILBERT, partial(_head, activation="relu"), _PRE_CLASSIFIER),
        ("ModernBert", _modernbert, _MODERNBERT, _modernbert_head, _LABELS),
        ("NomicBert", _nomic, _ROTARY, partial(_head, activation="tanh"), _POOLER),
        ("Gte", _gte, _ROTARY, partial(_head, activation="tanh"), _POOLER),
        ("New", _gte, _ROTARY, partial(_head, activation="tanh"), _POOLER),
    ):
        headless = EncoderFamily(read, _renaming(rules, headless=True))
        for suffix in ("Model", "ForMaskedLM", "ForPreTraining"):
            families[f"{prefix}{suffix}"] = headless
        classifier = EncoderFamily(read, _renaming((*rules, *head_rules), headless=False), head)
        families[f"{prefix}ForSequenceClassification"] = classifier
        of_tokens = _modernbert_token_head if prefix == "ModernBert" else _token_head
        renaming = _renaming((*rules, *_LABELS), headless=False)
        families[f"{prefix}ForTokenClassification"] = EncoderFamily(read, renaming, of_tokens)
    return families


#: The families by the architecture that config.json names.
ENCODERS: Final = _families()
