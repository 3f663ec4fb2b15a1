"""XLM."""

import torch
from torch import Tensor

from tests.conversion.architectures import VOCAB, Architecture


def sinusoids_again(model) -> None:
    """The table that `sinusoidal_embeddings` starts with."""
    if model.config.sinusoidal_embeddings:
        table = model.base_model.position_embeddings.weight
        places, columns = torch.arange(table.shape[0]).double(), torch.arange(table.shape[1])
        angles = places[:, None] / 10000 ** (2 * (columns // 2) / table.shape[1]).double()
        table.copy_(torch.where(columns % 2 == 0, angles.sin(), angles.cos()).float())


def with_languages(head: str, given: dict[str, Tensor]) -> dict[str, Tensor]:
    """Some classes are told languages, others are not."""
    if head in ("XLMForTokenClassification", "XLMWithLMHeadModel"):
        return given
    generator = torch.Generator().manual_seed(9)
    return {**given, "langs": torch.randint(0, 3, given["input_ids"].shape, generator=generator)}


ARCHITECTURE = Architecture(
    model_type="xlm",
    ours="xformer",
    tiny=dict(vocab_size=VOCAB, emb_dim=32, n_layers=2, n_heads=4, max_position_embeddings=24, n_langs=3),
    heads={
        "XLMWithLMHeadModel": "ForMaskedLM",
        "XLMModel": "Model",
        "XLMForSequenceClassification": "ForSequenceClassification",
        "XLMForTokenClassification": "ForTokenClassification",
        "XLMForQuestionAnsweringSimple": "ForQuestionAnswering",
    },
    headless={"XLMForQuestionAnswering": "Model", "XLMForMultipleChoice": "Model"},
    variations={
        "sinusoids": {"sinusoidal_embeddings": True},
        "relu": {"gelu_activation": False},
        "one language": {"n_langs": 1},
        "untied": {"tie_word_embeddings": False},
    },
    base=dict(emb_dim=768, n_heads=12),
    sides=("right",),
    ready=sinusoids_again,
    inputs=with_languages,
    refused=frozenset(
        {
            "asm",
            "causal",
            "is_encoder",
            "summary_activation",
            "summary_proj_to_labels",
            "summary_type",
            "summary_use_proj",
        }
    ),
    noted=frozenset({"embed_init_std", "summary_first_dropout"}),
    unread=frozenset({"use_lang_emb", "unk_index", "mask_index", "lang_id", "start_n_top", "end_n_top"}),
)
