"""The output of a model that generates no text: a vector, or scores of labels. Read from its folder; no torch.

A Sentence-Transformers folder (sbert.net) lists modules in modules.json: the encoder, how its rows are pooled, dense
layers, a normalisation. A folder without it makes vectors as Sentence-Transformers would: the mean of all rows.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from engine.declared import shown
from engine.errors import ModelError, RequestError
from engine.text.config import MOST_CONTEXT, MOST_WIDTH, Config, architectures, read_config
from engine.text.files import file_in, read_at_most, read_object

#: The ways to make one row of a sequence's rows, in the order in which several are put beside each other.
MODES: Final = ("cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken")
#: Their names before Sentence-Transformers 5.
_FLAGS: Final = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
#: Classes of torch that a dense layer or a cross-encoder may name -> the engine's activations.
_ACTIVATIONS: Final = {
    "torch.nn.modules.linear.Identity": "",
    "torch.nn.Identity": "",
    "torch.nn.modules.activation.Tanh": "tanh",
    "torch.nn.Tanh": "tanh",
    "torch.nn.modules.activation.ReLU": "relu",
    "torch.nn.ReLU": "relu",
    "torch.nn.modules.activation.GELU": "gelu",
    "torch.nn.GELU": "gelu",
    "torch.nn.modules.activation.SiLU": "silu",
    "torch.nn.SiLU": "silu",
    "torch.nn.modules.activation.Sigmoid": "sigmoid",
    "torch.nn.Sigmoid": "sigmoid",
}
#: The most modules of a folder, labels of a classifier, prompts, and characters of a prompt or label.
_MOST_MODULES: Final = 16
_MOST_LABELS: Final = 10_000
_MOST_PROMPTS: Final = 100
_LONGEST_TEXT: Final = 4096
#: Lines of a Qwen3-Reranker's README, in its metadata and below; and what its published code writes around a query and
#: a document, without an instruction of the user's own; and the most tokens that it takes.
_RANKS: Final = re.compile(rb"^pipeline_tag: *text-ranking *\r?$", re.M)
_IS_RERANKER: Final = re.compile(rb"^# *Qwen3-Reranker\b", re.M)
_AROUND_PAIRS: Final = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n',
    "<Instruct>: Given a web search query, retrieve relevant passages that answer the query\n<Query>: ",
    "\n<Document>: ",
    "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n",
)
_PUBLISHED_LENGTH: Final = 8192
#: The largest file of a module's settings, in bytes.
_LONGEST: Final = 1 << 20
#: Beginnings of the names of architectures whose positions are counted from after the padding's.
_AFTER_PADDING: Final = ("Roberta", "XLMRoberta", "MPNet")
_CLASSIFIER: Final = "ForSequenceClassification"
_PER_TOKEN: Final = "ForTokenClassification"  # noqa: S105 (no password)
#: What a model is for.
Purpose = Literal["generate", "embed", "classify", "token_classify", "rerank"]
#: Endings of the names of encoders' architectures without a head that is of use.
_HEADLESS: Final = ("Model", "ForMaskedLM", "ForPreTraining")


@dataclass(frozen=True, slots=True)
class DenseSettings:
    """A dense layer after pooling. `folder`: of its weights, within the model's. `activation`: "" for none."""

    folder: str
    inputs: int
    outputs: int
    bias: bool
    activation: str


@dataclass(frozen=True, slots=True)
class ScoreSettings:
    """A pair's score, of a decoder's logits after its last token: that of `true_token`, less that of `false_token` if
    there is one. Tokens are ids, or spellings of the vocabulary."""

    true_token: int | str
    false_token: int | str | None
    add_generation_prompt: bool
    around: tuple[str, str, str, str] | None = None
    """What is written at first, before a query, between it and the document, and after that. None: the chat template
    writes pairs, with the roles `query` and `document`."""


@dataclass(frozen=True, slots=True)
class PoolingSettings:
    """The way in which vectors are made of a sequence's rows, and the model's settings for texts."""

    modes: tuple[str, ...]
    """Of MODES; several are put beside each other."""
    steps: tuple[DenseSettings | None, ...]
    """What follows: dense layers, and None for a normalisation to length 1."""
    prompts: dict[str, str]
    """Texts to put before a text, by name."""
    default_prompt: str | None
    include_prompt: bool
    """Whether the rows of a prompt are pooled, too."""
    max_length: int | None
    """The most tokens of a text, if fewer than the encoder takes."""
    matryoshka: tuple[int, ...] | bool
    """The numbers of dimensions to which vectors may be cut; True for any, False for none."""
    score: ScoreSettings | None = None
    """Set if a pair is scored by the logits of tokens."""

    def dimensions(self, width: int) -> int:
        """The dimensions of a vector. `width`: of the encoder's rows."""
        return next((step.outputs for step in reversed(self.steps) if step is not None), width * len(self.modes))

    def text_before(self, name: str | None) -> str:
        """The text to put before a text: the prompt of this name, or the default one. Raises RequestError."""
        name = name or self.default_prompt
        if name is None:
            return ""
        if name not in self.prompts:
            names = ", ".join(map(repr, self.prompts)) or "none"
            raise RequestError(f"the model has no prompt {shown(name)}; it has {names}", param="prompt")
        return self.prompts[name]

    @classmethod
    def read(cls, folder: Path, values: Mapping[str, Any]) -> PoolingSettings:
        """Read the settings of a folder. `values`: its config.json. Raises ModelError naming what is not supported."""
        modules = _modules(folder)
        settings_file = _file(folder, "config_sentence_transformers.json")
        score = _score(folder, modules)
        if score is None and is_published_reranker(folder):
            score = ScoreSettings("yes", "no", False, _AROUND_PAIRS)
        if score is not None:
            modules = modules[:1]
        pooling: tuple[str, ...] = ("mean",)
        steps: list[DenseSettings | None] = []
        include_prompt: Any = True
        for kind, path in modules[1:]:
            if kind in ("Pooling", "Dense") and _bytes(folder, f"{path}/config.json") is None:
                raise ModelError(f"{folder} has no {path}/config.json, which modules.json names")
            if kind == "Pooling":
                settings = _file(folder, f"{path}/config.json")
                pooling, include_prompt = _pooling(settings), settings.get("include_prompt", True)
            elif kind == "Dense":
                steps.append(_dense(path, _file(folder, f"{path}/config.json")))
            elif kind == "Normalize":
                steps.append(None)
            else:
                raise ModelError(
                    f"{folder}: modules.json has a module {shown(kind)}; supported after the first are "
                    "Pooling, Dense and Normalize"
                )
        if type(include_prompt) is not bool:
            raise ModelError(f"{folder}: include_prompt={shown(include_prompt)} must be true or false")
        prompts = _prompts(settings_file.get("prompts"))
        default = settings_file.get("default_prompt_name")
        if default is not None and (not isinstance(default, str) or default not in prompts):
            raise ModelError(f"{folder}: default_prompt_name={shown(default)} is none of its prompts")
        return cls(
            pooling,
            tuple(steps),
            prompts,
            default,
            include_prompt,
            _max_length(folder) if score is None or score.around is None else _PUBLISHED_LENGTH,
            _matryoshka(Config(values)),
            score,
        )


def purpose(folder: Path, values: Mapping[str, Any]) -> Purpose:
    """The purpose of a model: of classifiers "token_classify" where each token has labels, "rerank" where a pair has
    one score.

    `values`: its config.json. Raises ModelError for a broken one.
    """
    names = architectures(values)
    if any(name.endswith(_CLASSIFIER) for name in names):
        return "rerank" if len(label_names(Config(values))) == 1 else "classify"
    if any(name.endswith(_PER_TOKEN) for name in names):
        return "token_classify"
    if _listed(folder) is not None:
        return "embed" if _score(folder, _modules(folder)) is None else "rerank"
    if is_published_reranker(folder):
        return "rerank"
    return "embed" if names and names[0].endswith(_HEADLESS) else "generate"


def label_names(config: Config) -> tuple[str, ...]:
    """The labels of a classifier, in the order of its logits. Raises ModelError."""
    named = config.get("id2label")
    if named is None:
        count = config.integer("num_labels", 2, high=_MOST_LABELS)
        return tuple(f"LABEL_{i}" for i in range(count))
    if not isinstance(named, dict) or not 1 <= len(named) <= _MOST_LABELS:
        raise config.wrong("id2label", f"must be an object of 1 to {_MOST_LABELS} labels")
    labels = [named.get(str(i)) for i in range(len(named))]
    if not all(isinstance(label, str) and len(label) <= _LONGEST_TEXT for label in labels):
        raise config.wrong("id2label", "must have a text for each number from 0")
    return tuple(map(str, labels))


def several_labels(config: Config) -> bool:
    """Whether a text, or a token, may have several labels at once: each has a probability of its own then."""
    return bool(config.get("problem_type") == "multi_label_classification")


def score_activation(folder: Path, values: Mapping[str, Any]) -> str:
    """The activation of a cross-encoder's score: "sigmoid", unless the folder names another. Raises ModelError."""
    section = values.get("sentence_transformers")
    named = section.get("activation_fn") if isinstance(section, dict) else None
    named = named or values.get("sbert_ce_default_activation_function")
    named = named or _file(folder, "config_sentence_transformers.json").get("activation_fn")
    return "sigmoid" if named is None else _activation(named)


def text_length(values: Mapping[str, Any]) -> int:
    """The most tokens of a text that an encoder takes. `values`: its config.json. Raises ModelError."""
    config = Config(values)
    rows = config.integer("n_positions" if "n_positions" in config else "max_position_embeddings", high=MOST_CONTEXT)
    if any(name.startswith(_AFTER_PADDING) for name in architectures(values)):
        if rows <= (first := first_position(values)):
            raise config.wrong("max_position_embeddings", f"must be above {first}, the position of the first token")
        rows -= first
    return rows


def first_position(values: Mapping[str, Any]) -> int:
    """The position of a text's first token: 0, or in RoBERTa's descendants the one after the padding's."""
    names = architectures(values)
    if not any(name.startswith(_AFTER_PADDING) for name in names):
        return 0
    # MPNet's padding is 1, whatever config.json has.
    return 2 if names[0].startswith("MPNet") else Config(values).integer("pad_token_id", 1, low=0) + 1


def _modules(folder: Path) -> list[tuple[str, str]]:
    """The kinds of a folder's modules, each with its path; without modules.json an encoder alone."""
    listed = _listed(folder)
    if listed is None:
        return [("Transformer", "")]
    modules = []
    for entry in listed:
        kind, path = (entry.get("type"), entry.get("path")) if isinstance(entry, dict) else (None, None)
        if not isinstance(kind, str) or not isinstance(path, str):
            raise ModelError(f"{folder}: modules.json has an entry without type and path: {shown(entry)}")
        modules.append((kind.rpartition(".")[2], path))
    if not modules or modules[0][0] != "Transformer" or modules[0][1] not in ("", "."):
        raise ModelError(f"{folder}: modules.json must begin with a Transformer in the folder itself")
    return modules


def _listed(folder: Path) -> list[Any] | None:
    data = _bytes(folder, "modules.json")
    if data is None:
        return None
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{folder}: modules.json is not valid JSON: {error}") from error
    if not isinstance(value, list) or len(value) > _MOST_MODULES:
        raise ModelError(f"{folder}: modules.json must be a list of at most {_MOST_MODULES} modules")
    return value


def _file(folder: Path, name: str) -> dict[str, Any]:
    """A JSON object of a folder; {} if the file is absent."""
    data = _bytes(folder, name)
    return {} if data is None else read_object({name: data}, name)


def _bytes(folder: Path, name: str) -> bytes | None:
    path = file_in(folder, name)
    return None if path is None else read_at_most(path, _LONGEST)


def _score(folder: Path, modules: list[tuple[str, str]]) -> ScoreSettings | None:
    """The settings of a module LogitScore, which stands alone after the first; None if there is none."""
    if "LogitScore" not in (kind for kind, _ in modules):
        return None
    if len(modules) != 2:
        raise ModelError(f"{folder}: modules.json has LogitScore beside others; it must stand alone")
    path = modules[1][1]
    config = Config(_file(folder, f"{path}/config.json"), f"{path}/config.json: ")
    false_token = config.integer("false_token_id", low=0) if "false_token_id" in config else None
    options = _file(folder, "sentence_bert_config.json").get("processing_kwargs")
    template = options.get("chat_template") if isinstance(options, dict) else None
    generates = Config(template if isinstance(template, dict) else {}).flag("add_generation_prompt")
    return ScoreSettings(config.integer("true_token_id", low=0), false_token, generates)


def is_published_reranker(folder: Path) -> bool:
    """Whether a folder has a Qwen3-Reranker as it was published first (arXiv 2506.05176). Its files are those of a
    model that generates: the README alone says what it is, so that this counts in the model's version."""
    try:
        path = file_in(folder, "README.md")
        if path is None:
            return False
        with path.open("rb") as file:
            mark, _, readme = file.read(_LONGEST).partition(b"\n")
    except (ModelError, OSError):  # no file of the folder: it says nothing, and is nothing that serving needs
        return False
    metadata, _, text = readme.partition(b"\n---")
    if mark.rstrip() != b"---" or not _RANKS.search(metadata) or not _IS_RERANKER.search(text):
        return False
    return _listed(folder) is None and architectures(read_config(folder))[:1] == ["Qwen3ForCausalLM"]


def _pooling(settings: Mapping[str, Any]) -> tuple[str, ...]:
    modes = settings.get("pooling_mode")
    if modes is None:
        modes = [mode for flag, mode in _FLAGS.items() if settings.get(flag)] or ["mean"]
    listed = [modes] if isinstance(modes, str) else modes
    if not isinstance(listed, list) or not listed or not all(mode in MODES for mode in listed):
        raise ModelError(f"the pooling {shown(modes)} is not supported; {', '.join(MODES)} are")
    if len(listed) > len(MODES):
        raise ModelError(f"the pooling {shown(modes)} has more than {len(MODES)} modes")
    return tuple(listed)


def _dense(path: str, values: Mapping[str, Any]) -> DenseSettings:
    config = Config(values, f"{path}/config.json: ")
    for name, usual in (("use_residual", (None, False)), ("module_input_name", (None, "sentence_embedding"))):
        if values.get(name) not in usual:
            raise config.wrong(name, f"is not supported; {shown(usual[1])} is")
    return DenseSettings(
        path,
        config.integer("in_features", high=MOST_WIDTH),
        config.integer("out_features", high=MOST_WIDTH),
        config.flag("bias", True),
        _activation(config.text("activation_function", "torch.nn.Tanh")),
    )


def _activation(name: object) -> str:
    if not isinstance(name, str) or name not in _ACTIVATIONS:
        raise ModelError(f"the activation {shown(name)} is not supported; {', '.join(sorted(_ACTIVATIONS))} are")
    return _ACTIVATIONS[name]


def _prompts(prompts: object) -> dict[str, str]:
    if prompts is None:
        return {}
    if not isinstance(prompts, dict) or len(prompts) > _MOST_PROMPTS:
        raise ModelError(f"prompts={shown(prompts)} must be an object of at most {_MOST_PROMPTS} texts")
    for name, text in prompts.items():
        if not isinstance(text, str) or max(len(text), len(name)) > _LONGEST_TEXT:
            raise ModelError(f"the prompt {shown(name)} must be a text of at most {_LONGEST_TEXT} characters")
    return dict(prompts)


def _max_length(folder: Path) -> int | None:
    config = Config(_file(folder, "sentence_bert_config.json"))
    if "max_seq_length" in config:
        return config.integer("max_seq_length")
    # Since version 6 Sentence-Transformers leaves it to the tokenizer, which has an enormous one if there is none.
    length = _file(folder, "tokenizer_config.json").get("model_max_length")
    return length if type(length) is int and 0 < length <= MOST_CONTEXT else None


def _matryoshka(config: Config) -> tuple[int, ...] | bool:
    """As vLLM reads it: a list of numbers of dimensions, or that any will do."""
    listed = config.get("matryoshka_dimensions")
    if listed is None:
        return config.flag("is_matryoshka")
    if not isinstance(listed, list) or not _positive(listed):
        raise config.wrong("matryoshka_dimensions", "must be a list of numbers of dimensions")
    return tuple(sorted(listed))


def _positive(values: Iterable[object]) -> bool:
    return all(type(value) is int and 0 < value <= MOST_WIDTH for value in values)


def read_pooling(folder: str | Path) -> PoolingSettings:
    """The settings of a folder. Raises ModelError."""
    return PoolingSettings.read(Path(folder), read_config(folder))
