# SPDX-License-Identifier: Apache-2.0
"""Tokenizers: train one on a corpus, load one by name, and check that a tokenizer and a model configuration agree.

A trained tokenizer has the special tokens of the models that it is for: BERT's (the class token is also `bos`, the
separator also `eos`), GPT-2's or T5's, and sentinels `<extra_id_0>`, `<extra_id_1>`, ... for span corruption. Training
is
deterministic: the same texts give the same ids in every process.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from ..core.saved_files import read_object
from .vocabulary import RereadableTexts, train_bpe, train_unigram, train_wordpiece

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase, PreTrainedTokenizerFast

TokenizerKind = Literal["bpe", "wordpiece", "unigram"]
Template = Literal["cls_sep", "bos", "eos", "between", "none"]
Style = Literal["bert", "gpt", "t5"]

# Roles in the order of their ids.
SPECIAL_TOKENS = {"pad": "[PAD]", "unk": "[UNK]", "cls": "[CLS]", "sep": "[SEP]", "mask": "[MASK]"}
_GPT_TOKENS = {"eos": "<|endoftext|>", "pad": "<|pad|>", "unk": "<|unk|>"}
_T5_TOKENS = {"pad": "<pad>", "eos": "</s>", "unk": "<unk>"}
_USUAL_TEMPLATE: dict[str, Template] = {"bert": "cls_sep", "gpt": "between", "t5": "eos"}
_CHECKED_ROLES = ("pad", "bos", "eos", "cls", "sep", "mask")
_TOKENIZER_FILES = (
    *("tokenizer.json", "vocab.txt", "vocab.json", "tokenizer.model", "spiece.model", "spm.model"),
    "sentencepiece.bpe.model",
)


def train_tokenizer(
    texts: Iterable[str] | Iterable[Mapping[str, Any]],
    kind: TokenizerKind = "bpe",
    vocab_size: int = 8192,
    *,
    special_tokens: Mapping[str, str] | None = None,
    num_sentinels: int = 100,
    style: Style = "bert",
    template: Template | None = None,
    lowercase: bool = False,
    model_max_length: int | None = None,
) -> PreTrainedTokenizerFast:
    """Trains a subword vocabulary and returns a fast tokenizer that `save_pretrained` and `AutoTokenizer` handle.

    Args:
        texts: strings, or rows with a string under `text` (a `datasets.Dataset`, streamed or not). Read more than
            once; a one-shot iterator is therefore kept in memory.
        kind: `bpe`, byte-level BPE (Radford et al. 2019, section 2.2): no unknown token and exact round trips;
            `wordpiece` (Schuster and Nakajima 2012; Devlin et al. 2019) with BERT's normalization;
            `unigram` (Kudo 2018) with NFKC and SentencePiece's word mark, as T5 and ALBERT: white space is not kept.
        vocab_size: number of ids wanted, special tokens and sentinels included; a small corpus may give fewer.
        special_tokens: other spellings for some of the style's roles, for instance `{"pad": "<pad>"}`.
        style: whose special tokens, in the order of their ids from 0.
            `bert`: `[PAD]`, `[UNK]`, `[CLS]` (also bos), `[SEP]` (also eos), `[MASK]`;
            `gpt`: `<|endoftext|>` (bos and eos), `<|pad|>` and, but for `bpe`, `<|unk|>`;
            `t5`: `<pad>`, `</s>` (eos), `<unk>`.
        num_sentinels: number of `<extra_id_i>`. They get the last ids, `<extra_id_0>` the very last, as in T5.
        template: the special tokens around a text A or a pair A, B; [CLS] and [SEP] stand for bos and eos of other
            styles. `cls_sep` (usual for `bert`): `[CLS] A [SEP]` and `[CLS] A [SEP] B [SEP]`, token types 0 up to the
            first `[SEP]`, then 1;
            `bos`: `[CLS] A` and `[CLS] A [SEP] B`, open-ended prompts for causal models;
            `eos` (usual for `t5`): `A [SEP]` and `A [SEP] B [SEP]`;
            `between` (usual for `gpt`): `A` and `A [SEP] B`; `none`: the texts alone.
        lowercase: fold case before everything else.
        model_max_length: longest input of the model in tokens, which the tokenizer truncates to on demand.

    Raises:
        ValueError: unknown `kind`, `style`, `template` or role, a template that begins with a token the style has not,
            two roles of one spelling, no text, or a `vocab_size` smaller than the alphabet that the corpus needs.
        TypeError: `texts` is one string, or holds something that is neither a string nor a row with `text`.
    """
    from tokenizers import AddedToken
    from transformers import PreTrainedTokenizerFast

    _check_choice("kind", kind, TokenizerKind)
    _check_choice("style", style, Style)
    template = template or _USUAL_TEMPLATE[style]
    _check_choice("template", template, Template)
    if num_sentinels < 0:
        raise ValueError(f"num_sentinels={num_sentinels} is negative; take 0 for none or 100 as T5 does")
    names = _special_names(special_tokens, _roles_of(style, kind))
    start, end = names.get("cls", names["eos"] if style == "gpt" else None), names.get("sep", names.get("eos"))
    if start is None and template in ("cls_sep", "bos"):
        raise ValueError(
            f"template={template!r} begins a text with a token that style={style!r} has not; take template='eos' or"
            " 'none'"
        )
    corpus = RereadableTexts(texts)
    if not any(text.strip() for text in corpus):
        raise ValueError("texts holds no text to train a tokenizer on; give at least one non-blank string")

    # The mask takes the space before it along, since a word piece that it stands for carries that space.
    specials = [
        AddedToken(name, special=True, normalized=False, lstrip=role == "mask" and kind != "wordpiece")
        for role, name in names.items()
    ]
    trainer = {"bpe": train_bpe, "wordpiece": train_wordpiece, "unigram": train_unigram}[kind]
    backend = trainer(corpus, vocab_size, num_sentinels, specials, lowercase, names.get("unk", ""))
    backend.post_processor = _post_processor(kind, template, list(names.values()), start, end)
    by_role = dict(zip(names, specials, strict=True))
    roles = {"bert": {"bos": "cls", "eos": "sep"}, "gpt": {"bos": "eos"}, "t5": {}}[style]
    options: dict[str, Any] = {f"{role}_token": token for role, token in by_role.items()}
    options |= {f"{role}_token": by_role[same] for role, same in roles.items()}
    if model_max_length is not None:
        options["model_max_length"] = model_max_length
    typed = ["token_type_ids"] if template == "cls_sep" else []
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        extra_special_tokens=_sentinel_names(num_sentinels),
        model_input_names=["input_ids", *typed, "attention_mask"],
        clean_up_tokenization_spaces=False,
        **options,
    )


def load_tokenizer(
    name_or_path: str | Path,
    *,
    add_missing: Sequence[str] = (),
    num_sentinels: int = 0,
) -> PreTrainedTokenizerBase:
    """`AutoTokenizer.from_pretrained` with messages that say what to do.

    Args:
        name_or_path: a Hub id, or a folder written by `save_pretrained`.
        add_missing: roles among `pad`, `cls`, `sep`, `mask` to add where the tokenizer lacks them (GPT-2 has no
            padding token, for instance). The vocabulary grows: call `model.resize_token_embeddings(len(tokenizer))`.
        num_sentinels: add this many `<extra_id_i>` for span corruption if it has none. The vocabulary grows likewise.

    Raises:
        ValueError: a folder that does not exist or holds no tokenizer, an unreachable Hub id, or an unknown role.
    """
    from transformers import AutoTokenizer

    from . import word_characters  # noqa: F401  (AutoTokenizer then knows its class)

    addable = ("pad", "cls", "sep", "mask")
    unknown = [role for role in add_missing if role not in addable]
    if unknown:
        raise ValueError(f"add_missing holds {unknown[0]!r}; it takes roles among {', '.join(addable)}")
    folder = Path(name_or_path).expanduser()
    known = any((folder / file).is_file() for file in _TOKENIZER_FILES) or _has_no_vocabulary(folder)
    if folder.is_dir() and not known:
        raise ValueError(
            f"the folder {str(name_or_path)!r} holds no tokenizer (none of {', '.join(_TOKENIZER_FILES)}); "
            "write one there with tokenizer.save_pretrained(...)"
        )
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(folder) if folder.is_dir() else str(name_or_path))
    except (OSError, ValueError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ValueError(
            f"no tokenizer could be loaded from {str(name_or_path)!r} ({reason}); give the folder of a saved "
            "tokenizer, train one with train_tokenizer(texts), or, for a Hub id, check it and enable the network "
            "(unset HF_HUB_OFFLINE)"
        ) from error
    lacking = [role for role in add_missing if getattr(tokenizer, f"{role}_token") is None]
    tokenizer.add_special_tokens({f"{role}_token": SPECIAL_TOKENS[role] for role in lacking})
    if num_sentinels and not sentinel_ids(tokenizer):
        tokenizer.add_special_tokens(
            {"extra_special_tokens": _sentinel_names(num_sentinels)}, replace_extra_special_tokens=False
        )
    return tokenizer


def _has_no_vocabulary(folder: Path) -> bool:
    """Whether a folder has a tokenizer that needs no file, as those of bytes do."""
    import transformers

    path = folder / "tokenizer_config.json"
    name = read_object(path).get("tokenizer_class") if path.is_file() else None
    return getattr(getattr(transformers, str(name), None), "vocab_files_names", None) == {}


def sentinel_ids(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Ids of `<extra_id_0>`, `<extra_id_1>`, ... as far as the tokenizer has them; empty when it has none."""
    vocabulary = tokenizer.get_vocab()
    ids: list[int] = []
    while (name := f"<extra_id_{len(ids)}>") in vocabulary:
        ids.append(vocabulary[name])
    return ids


def vocabulary_fields(tokenizer: PreTrainedTokenizerBase) -> dict[str, int | None]:
    """The configuration fields that a tokenizer decides: `vocab_size`, `pad_token_id`, `bos_token_id`, `eos_token_id`.

    For a new model: `XFormerConfig(**vocabulary_fields(tokenizer), ...)`.
    """
    fields: dict[str, int | None] = {"vocab_size": _highest_id(tokenizer) + 1}
    for role in ("pad", "bos", "eos"):
        fields[f"{role}_token_id"] = getattr(tokenizer, f"{role}_token_id")
    return fields


def check_tokenizer(tokenizer: PreTrainedTokenizerBase, config: PreTrainedConfig) -> None:
    """Refuses a tokenizer whose ids a model of this configuration would misread.

    An id of the configuration that is None is not compared, nor is one that the tokenizer has no token for, unless
    that id is an ordinary token of it (then the model would treat a word as padding, say).

    Raises:
        ValueError: an id of the tokenizer is `config.vocab_size` or more, or the two differ in a special token's id.
    """
    size = _highest_id(tokenizer) + 1
    if size > config.vocab_size:
        raise ValueError(
            f"the tokenizer has {size} ids but config.vocab_size is {config.vocab_size}; build the model with "
            f"vocab_size={size}, or call model.resize_token_embeddings({size})"
        )
    special_ids = set(tokenizer.all_special_ids)
    for role in _CHECKED_ROLES:
        configured = getattr(config, f"{role}_token_id", None)
        if configured is None:
            continue
        accepted = list(configured) if isinstance(configured, (list, tuple)) else [configured]
        own = getattr(tokenizer, f"{role}_token_id", None)
        if own is not None and own not in accepted:
            raise ValueError(
                f"{role}_token_id is {configured} in the config but {own} ({tokenizer.convert_ids_to_tokens(own)!r}) "
                f"in the tokenizer; set config.{role}_token_id={own}, or use the tokenizer the model was trained with"
            )
        ordinary = [i for i in accepted if 0 <= i < size and i not in special_ids]
        if own is None and ordinary:
            raise ValueError(
                f"config.{role}_token_id={configured} is the ordinary token "
                f"{tokenizer.convert_ids_to_tokens(ordinary[0])!r} of a tokenizer without {role} token; set "
                f"config.{role}_token_id=None, or add the token with load_tokenizer(..., add_missing=[{role!r}])"
            )


def _post_processor(kind: str, template: str, names: Sequence[str], cls: str | None, sep: str | None) -> Any:
    """names: of the special tokens by id. cls, sep: what begins a text and what ends it."""
    from tokenizers import processors

    single, pair = {
        "cls_sep": (f"{cls}:0 $A:0 {sep}:0", f"{cls}:0 $A:0 {sep}:0 $B:1 {sep}:1"),
        "bos": (f"{cls}:0 $A:0", f"{cls}:0 $A:0 {sep}:0 $B:0"),
        "eos": (f"$A:0 {sep}:0", f"$A:0 {sep}:0 $B:0 {sep}:0"),
        "between": ("$A:0", f"$A:0 {sep}:0 $B:0"),
        "none": ("$A:0", "$A:0 $B:0"),
    }[template]
    ids = [(name, index) for index, name in enumerate(names) if name in (cls, sep)]
    around = processors.TemplateProcessing(single=single, pair=pair, special_tokens=ids)
    # Byte-level pieces hold the space before a word; their offsets should not, or answers and entities shift by one.
    return processors.Sequence([processors.ByteLevel(trim_offsets=True), around]) if kind == "bpe" else around


def _roles_of(style: str, kind: str) -> dict[str, str]:
    """Role -> usual spelling, in the order of the ids. Bytes are never unknown."""
    roles = {"bert": SPECIAL_TOKENS, "gpt": _GPT_TOKENS, "t5": _T5_TOKENS}[style]
    return {role: name for role, name in roles.items() if not (style == "gpt" and kind == "bpe" and role == "unk")}


def _special_names(overrides: Mapping[str, str] | None, roles: Mapping[str, str]) -> dict[str, str]:
    unknown = sorted(set(overrides or {}) - set(roles))
    if unknown:
        raise ValueError(f"special_tokens has the role {unknown[0]!r}; the roles are {', '.join(roles)}")
    names = {**roles, **(overrides or {})}
    repeated = [name for name, count in Counter(names.values()).items() if count > 1 or not name]
    if repeated:
        raise ValueError(f"special_tokens spells two roles {repeated[0]!r}; every role needs a spelling of its own")
    return names


def _sentinel_names(count: int) -> list[str]:
    return [f"<extra_id_{index}>" for index in reversed(range(count))]


def _highest_id(tokenizer: PreTrainedTokenizerBase) -> int:
    # Not len(tokenizer) - 1: added tokens may leave holes in the numbering.
    return max(tokenizer.get_vocab().values())


def _check_choice(name: str, value: str, choices: Any) -> None:
    if value not in get_args(choices):
        raise ValueError(f"{name}={value!r} is unknown; take one of {', '.join(get_args(choices))}")
