"""Folders of Sentence-Transformers with random weights and a small tokenizer, as that library writes them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers

from tests.engine.random_encoders import random_encoder

SPECIAL = ["[PAD]", "[CLS]", "[SEP]", "[UNK]", "[MASK]"]
TEXTS = [
    "A penstock feeds a turbine.",
    "rain",
    "The queue is long, and the workers are few; still nothing is lost.",
    "Ünïcödé wörds, 数字 and emoji 🙂 are text, too.",
    "a b c d e f g h i j k l m n o p q r s t u v w x y z " * 2,
]


def small_tokenizer(size: int = 320) -> Any:
    """BERT's kind of tokenizer, of some words."""
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    backend.normalizer = normalizers.BertNormalizer()
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    trainer = trainers.WordPieceTrainer(vocab_size=size, special_tokens=SPECIAL, show_progress=False)
    backend.train_from_iterator(TEXTS * 3, trainer)
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[(name, SPECIAL.index(name)) for name in ("[CLS]", "[SEP]")],
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="[PAD]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        unk_token="[UNK]",
        mask_token="[MASK]",
        model_max_length=96,
        model_input_names=["input_ids", "token_type_ids", "attention_mask"],
    )


def write_encoder_with_tokenizer(folder: Path, name: str, suffix: str = "Model", **changes: Any) -> None:
    tokenizer = small_tokenizer()
    random_encoder(name, suffix, **changes).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


#: A template of pairs, with something before, between and after them.
PAIRS = (
    """judge: {{ messages | selectattr("role", "eq", "query") | map(attribute="content") | first }} by """
    """{{ messages | selectattr("role", "eq", "document") | map(attribute="content") | first }}, now the queue is """
    """long{% if add_generation_prompt %}: few{% endif %}"""
)


def write_decoder(folder: Path, suffix: str = "Model") -> None:
    """Write a small Qwen3; as "Model" without its head, as Qwen3-Embedding is published."""
    import torch
    import transformers

    config = transformers.Qwen3Config(
        vocab_size=320,
        hidden_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        intermediate_size=80,
        max_position_embeddings=96,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    model = getattr(transformers, f"Qwen3{suffix}")(config).float().eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, float(parameter.dim() == 1), 0.15)
    model.save_pretrained(folder)
    tokenizer = small_tokenizer()
    if suffix != "Model":
        tokenizer.chat_template, tokenizer.padding_side = PAIRS, "left"
    tokenizer.save_pretrained(folder)


def write_gemma(folder: Path) -> Any:
    """Write a small EmbeddingGemma: a Gemma 3 whose tokens see both sides, the mean, two dense layers, normalised.
    Returns Sentence-Transformers' model of it."""
    import torch
    import transformers
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Dense, Normalize, Pooling, Transformer

    config = transformers.Gemma3TextConfig(
        vocab_size=320,
        hidden_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        query_pre_attn_scalar=20,
        intermediate_size=80,
        max_position_embeddings=96,
        sliding_window=9,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"],
        use_bidirectional_attention=True,
    )
    torch.manual_seed(0)
    model = transformers.Gemma3TextModel(config).float().eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, 0.0, 0.15)
    plain = folder.parent / f"{folder.name}-decoder"
    model.save_pretrained(plain)
    small_tokenizer().save_pretrained(plain)
    dense = [Dense(*shape, bias=False, activation_function=torch.nn.Identity()) for shape in ((48, 64), (64, 48))]
    modules = [Transformer(str(plain), max_seq_length=90), Pooling(48, pooling_mode="mean"), *dense, Normalize()]
    truth = SentenceTransformer(modules=modules, device="cpu", prompts={"query": "task: search | query: "})
    truth.save(str(folder))
    return truth


def write_pair_scorer(folder: Path) -> Any:
    """Write a decoder that scores pairs by the logits of two tokens, as Qwen3-Reranker does. Returns
    Sentence-Transformers' model of it."""
    from sentence_transformers import CrossEncoder
    from sentence_transformers.cross_encoder.modules import LogitScore, Transformer

    plain = folder.parent / f"{folder.name}-decoder"
    write_decoder(plain, "ForCausalLM")
    options = {"chat_template": {"add_generation_prompt": True}}
    decoder = Transformer(str(plain), transformer_task="text-generation", processing_kwargs=options)
    truth = CrossEncoder(modules=[decoder, LogitScore(50, 60)], device="cpu")
    truth.save_pretrained(str(folder))
    return truth


#: The beginning of the published README.
RERANKERS_README = """---
license: apache-2.0
base_model:
- Qwen/Qwen3-0.6B-Base
library_name: transformers
pipeline_tag: text-ranking
---
# Qwen3-Reranker-0.6B

"""


def write_published_reranker(folder: Path) -> Callable[..., list[float]]:
    """Write a small Qwen3-Reranker without modules.json. Returns its published code: the scores of pairs, of at most so
    many tokens."""
    import torch
    import transformers
    from tokenizers import AddedToken, decoders, pre_tokenizers

    marks = ["<|im_start|>", "<|im_end|>", "<think>", "</think>"]
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=420, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator([*TEXTS * 3, "yes no " * 20, "yes", "no"] * 2, trainer)
    backend.add_special_tokens([AddedToken(mark, special=True) for mark in marks])
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, padding_side="left")
    config = transformers.Qwen3Config(
        vocab_size=440,
        hidden_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        intermediate_size=80,
        max_position_embeddings=512,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    model = transformers.Qwen3ForCausalLM(config).float().eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, float(parameter.dim() == 1), 0.15)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "README.md").write_text(RERANKERS_README)
    prefix = (
        "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
        'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
    )
    suffix = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    first, last = (tokenizer.encode(text, add_special_tokens=False) for text in (prefix, suffix))
    yes, no = tokenizer.convert_tokens_to_ids("yes"), tokenizer.convert_tokens_to_ids("no")
    instruction = "Given a web search query, retrieve relevant passages that answer the query"

    def scores(pairs: Sequence[tuple[str, str]], longest: int = 512) -> list[float]:
        texts = [f"<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}" for query, document in pairs]
        room = longest - len(first) - len(last)
        told = []
        for ids in tokenizer(texts, padding=False, truncation="longest_first", max_length=room)["input_ids"]:
            with torch.no_grad():
                logits = model(input_ids=torch.tensor([[*first, *ids, *last]])).logits[0, -1]
            told.append(torch.log_softmax(logits[[no, yes]], 0)[1].exp().item())
        return told

    return scores


def write_sentence_folder(
    folder: Path,
    modes: Sequence[str] = ("mean",),
    *,
    dense: int = 0,
    normalize: bool = True,
    decoder: bool = False,
    **more: Any,
) -> Any:
    """Write a folder of Sentence-Transformers with a small BERT, or a small Qwen3 (`decoder`). Returns that library's
    model of it. `dense`: the outputs of a dense layer after pooling; 0: there is none. `more`: as of
    SentenceTransformer."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Dense, Normalize, Pooling, Transformer

    plain = folder.parent / f"{folder.name}-encoder"
    if decoder:
        write_decoder(plain)
    else:
        write_encoder_with_tokenizer(plain, "bert")
    modules: list[Any] = [Transformer(str(plain), max_seq_length=40)]
    include_prompt = more.pop("include_prompt", True)
    modules.append(Pooling(48, pooling_mode=tuple(modes), include_prompt=include_prompt))
    if dense:
        modules.append(Dense(48 * len(modes), dense))
    if normalize:
        modules.append(Normalize())
    truth = SentenceTransformer(modules=modules, device="cpu", **more)
    truth.save(str(folder))
    return truth
