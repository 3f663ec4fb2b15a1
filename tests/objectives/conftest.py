"""Tiny tokenizers, built in memory: a BERT-like one, one with T5 sentinels, and a GPT-like one without pad token."""

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

WORDS = [f"w{index}" for index in range(40)]


def _core(tokens, model="wordpiece"):
    vocabulary = {token: index for index, token in enumerate(tokens)}
    if model == "wordpiece":
        core = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]", max_input_chars_per_word=50))
    else:
        core = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    return core


@pytest.fixture(scope="session")
def bert_tokenizer():
    """Ids: pad 0, unk 1, cls 2, sep 3, mask 4, words w0.. from 5, then pieces of the word "unbelievable"."""
    tokens = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS, "un", "##believ", "##able", "play", "##ing"]
    core = _core(tokens)
    core.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token="[PAD]",
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        mask_token="[MASK]",
        model_input_names=["input_ids", "token_type_ids", "attention_mask"],
    )


@pytest.fixture(scope="session")
def t5_tokenizer():
    """Ids: pad 0, eos 1, unk 2, words from 3, and <extra_id_9>..<extra_id_0> as the last ten, as in T5."""
    sentinels = [f"<extra_id_{index}>" for index in reversed(range(10))]
    return PreTrainedTokenizerFast(
        tokenizer_object=_core(["<pad>", "</s>", "[UNK]", *WORDS, *sentinels], "wordlevel"),
        pad_token="<pad>",
        eos_token="</s>",
        unk_token="[UNK]",
        extra_special_tokens=sentinels,
    )


@pytest.fixture(scope="session")
def gpt_tokenizer():
    """Ids: eos 0, unk 1, words from 2; the pad token is the eos token."""
    return PreTrainedTokenizerFast(
        tokenizer_object=_core(["<|endoftext|>", "[UNK]", *WORDS], "wordlevel"),
        eos_token="<|endoftext|>",
        pad_token="<|endoftext|>",
        unk_token="[UNK]",
    )
