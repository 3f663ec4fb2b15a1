"""Collator, head and loss together: a tiny model learns one batch by heart, tokens and what is told beside them."""

import pytest
import torch

from hf_xformers.objectives import build_objective
from hf_xformers.training.building import build_config, build_model
from hf_xformers.training.evaluation import scored, scored_beside, token_statistics
from hf_xformers.training.trainer_evaluation import FURTHER_LABELS
from hf_xformers.variants import config_class

SIZES = dict(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64)
SIZES |= dict(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
# objective: variant, settings, what has a label beside tokens
CASES = {
    "segment_reordering": ("xf_ernie_doc", {"chunks": 2}, "order"),
    "struct_bert": ("xf_bert", {}, "sentence"),
    "unilm": ("xf_unilm", {"mode_probs": (0.7, 0.1, 0.1, 0.1)}, "sentence"),
}


def features(number=6, length=14):
    """Rows [CLS] A [SEP] B [SEP] of random words, and labels of pairs that nothing but the text tells."""
    draw = torch.Generator().manual_seed(0)
    rows = []
    for index in range(number):
        words = torch.randint(5, 45, (length,), generator=draw).tolist()
        half = length // 2
        types = [0] * (half + 2) + [1] * (length - half + 1)
        ids = [2, *words[:half], 3, *words[half:], 3]
        special = [int(token in (2, 3)) for token in ids]
        label = {"next_sentence_label": index % 2}
        rows.append({"input_ids": ids, "token_type_ids": types, "special_tokens_mask": special, **label})
    return rows


@pytest.mark.parametrize("name", CASES)
def test_one_batch_is_learned_by_heart(bert_tokenizer, name):
    variant, settings, beside = CASES[name]
    objective = build_objective({"type": name, **settings})
    config = build_config(
        config_class(variant), "tiny", objective, fields={**SIZES, "vocab_size": 50}, tokenizer=bert_tokenizer
    )
    batch = objective.collator(bert_tokenizer).as_static()(features())
    torch.manual_seed(0)
    model = build_model(config, objective).train()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    for _ in range(120):
        output = model(**batch)
        optimizer.zero_grad()
        output.loss.backward()
        optimizer.step()
    with torch.no_grad():
        output = model.eval()(**batch)
    figures = {"tokens": scored(output, batch["labels"]), **scored_beside(FURTHER_LABELS, output, batch)}
    assert set(figures) == {"tokens"} | ({beside} if beside else set())
    for kind, (logits, wanted) in figures.items():
        loss, count, right = token_statistics(logits, wanted, next_token=False).sum(0).tolist()
        assert len(wanted[wanted != -100].unique()) > 1, kind
        assert right == count and loss < 0.05 * count, (kind, loss / count)
