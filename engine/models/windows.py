"""Reads the attention window of each layer from config.json, in its various spellings."""

from __future__ import annotations

from engine.text.config import MOST_CONTEXT, MOST_LAYERS, Config


def uniform_windows(config: Config) -> tuple[int | None, ...]:
    """The same window for all layers: config.json's sliding_window, or none if that is null."""
    layers = config.integer("num_hidden_layers", high=MOST_LAYERS)
    window = _window(config) if "sliding_window" in config else None
    kind = "full_attention" if window is None else "sliding_attention"
    if config.get("layer_types") is not None and set(_layer_types(config, layers)) != {kind}:
        raise config.wrong("layer_types", f"does not go with sliding_window={window}: all layers must be {kind!r}")
    return (window,) * layers


def mixed_windows(config: Config, default: list[bool]) -> tuple[int | None, ...]:
    """Windows for the layers that slide according to `layer_types`, or else according to `default`."""
    if config.get("layer_types") is not None:
        default = [kind == "sliding_attention" for kind in _layer_types(config, len(default))]
    if not any(default):
        return (None,) * len(default)
    window = _window(config)
    return tuple(window if slides else None for slides in default)


def qwen_windows(config: Config) -> tuple[int | None, ...]:
    """Qwen's windows: with use_sliding_window, the layers from max_window_layers on have one."""
    layers = config.integer("num_hidden_layers", high=MOST_LAYERS)
    slides = config.flag("use_sliding_window") and "sliding_window" in config
    first = config.integer("max_window_layers", low=0)
    if not slides and config.get("layer_types") is not None and "sliding_attention" in _layer_types(config, layers):
        raise config.wrong("layer_types", "has sliding layers although use_sliding_window is off")
    return mixed_windows(config, [slides and i >= first for i in range(layers)])


def _window(config: Config) -> int:
    return config.integer("sliding_window", high=MOST_CONTEXT)


def _layer_types(config: Config, layers: int) -> list[str]:
    kinds = config.get("layer_types")
    supported = ("full_attention", "sliding_attention")
    if not isinstance(kinds, list) or len(kinds) != layers or not all(kind in supported for kind in kinds):
        raise config.wrong("layer_types", f"must be a list of {layers} of {', '.join(map(repr, supported))}")
    return kinds
