"""Contract: every head, on each way in which a model makes the states that it reads."""

import itertools

import pytest
import torch
import transformers
from accelerate import cpu_offload
from transformers import AutoConfig

from hf_xformers.variants import config_class, family
from tests.common.cases import AUTO, TESTED_HEADS
from tests.helpers import aligned, close, make_strong, pad, tiny_fields, tokens

LABELS = {
    "Model": {},
    "ForMaskedLM": {"labels": "ids"},
    "ForCausalLM": {"labels": "ids"},
    "ForSeq2SeqLM": {"labels": "ids"},
    "ForSequenceClassification": {"labels": torch.tensor([2, 0])},
    "ForTokenClassification": {"labels": tokens(2, 7, low=0, high=3)},
    "ForReplacedTokenDetection": {"labels": tokens(2, 7, low=0, high=2)},
    "ForReplacedTokenPreTraining": {"labels": tokens(2, 7, seed=3)},
    "ForMaskedSentences": {"labels": "ids"},
    "ForMultiTokenPrediction": {"labels": "ids"},
    "ForBidirectionalLM": {"labels": "ids"},
    "ForClozeWriting": {"labels": "ids"},
    "ForQuestionAnswering": {"start_positions": torch.tensor([1, 0]), "end_positions": torch.tensor([3, 2])},
    "ForMultipleChoice": {"labels": torch.tensor([1, 0])},
    "ForNextSentencePrediction": {"labels": torch.tensor([1, 0])},
    "ForEntityReplacement": {
        "labels": "ids",
        "entity_boundaries": torch.tensor([[[1, 4]], [[0, 2]]]),
        "entity_labels": torch.tensor([[1], [0]]),
    },
    "ForSpanBoundary": {
        "labels": "ids",
        "span_boundaries": torch.tensor([[[1, 4]], [[0, 2]]]),
        "span_target_places": torch.tensor([[1], [0]]),
        "span_labels": torch.tensor([[5], [-100]]),
    },
    "ForTextContrast": {"labels": torch.tensor([0, 0])},
    "ForPhraseContrast": {"labels": "ids", "phrase_input_ids": tokens(2, 4, seed=3)},
    "ForContrastivePrediction": {"labels": "ids"},
    "ForSegmentReordering": {"labels": "ids", "reordering_labels": torch.tensor([1, 0])},
    "ForPreTraining": {"labels": "ids", "next_sentence_label": torch.tensor([1, 0])},
}
RESULTS = {
    "ForSegmentReordering": ("logits", "reordering_logits"),
    "Model": ("last_hidden_state",),
    "ForTextContrast": ("vectors",),
    "ForQuestionAnswering": ("start_logits", "end_logits"),
    "ForPreTraining": ("prediction_logits", "seq_relationship_logits"),
}
PER_TOKEN = ("last_hidden_state", "start_logits", "end_logits", "prediction_logits")
TOKEN_HEADS = (
    *("ForMaskedLM", "ForCausalLM", "ForSeq2SeqLM", "ForTokenClassification", "ForReplacedTokenDetection"),
    "ForMaskedSentences",
    "ForSpanBoundary",
    "ForEntityReplacement",
    "ForPhraseContrast",
    "ForReplacedTokenPreTraining",
    "ForContrastivePrediction",
    "ForMultiTokenPrediction",
    "ForBidirectionalLM",
    "ForClozeWriting",
)


def build(name, head, dtype=torch.float64):
    kind = "seq2seq" if head == "ForSeq2SeqLM" else "encoder"
    config = config_class(name)(**tiny_fields(config_class(name), kind, num_labels=3))
    torch.manual_seed(0)
    return make_strong(family(name)[head](config).to(dtype).eval())


def inputs(head, ids, mask=None):
    """`ids` [2, T] as this head takes them: two choices per row for multiple choice."""
    if head == "ForMultipleChoice":
        ids = torch.stack([ids, ids.flip(0)], dim=1)
        mask = None if mask is None else torch.stack([mask, mask.flip(0)], dim=1)
    return {"input_ids": ids, "attention_mask": mask}


def labels(head, ids):
    if head not in LABELS:
        pytest.fail(f"say in LABELS which labels the head {head!r} takes")
    return {name: ids if isinstance(value, str) else value for name, value in LABELS[head].items()}


def results(head, output):
    return {name: getattr(output, name) for name in RESULTS.get(head, ("logits",))}


each_head = pytest.mark.parametrize(
    ("name", "head"), TESTED_HEADS, ids=[f"{name}-{head}" for name, head in TESTED_HEADS]
)


@each_head
def test_loss_and_saving(name, head, tmp_path):
    model, ids = build(name, head, torch.float32), tokens(2, 7)
    output = model(**inputs(head, ids), **labels(head, ids))
    values = model(**inputs(head, ids), **labels(head, ids), return_dict=False)
    assert isinstance(values, tuple) and torch.equal(values[0], next(iter(output.values())))
    if head != "Model":
        assert output.loss.ndim == 0 and output.loss.isfinite() and output.loss > 0
        output.loss.backward()
        idle = [key for key, parameter in model.named_parameters() if parameter.grad is None]
        assert not idle, f"without gradient: {idle}"
        assert all(parameter.grad.isfinite().all() for parameter in model.parameters())
    model.save_pretrained(tmp_path)
    found = getattr(transformers, AUTO[head])
    if found._model_mapping[model.config_class] is not type(model):  # the family has another head under that name
        found = type(model)
    loaded, report = found.from_pretrained(tmp_path, output_loading_info=True)
    assert type(loaded) is type(model) and not any(report.values()), report
    again = aligned(loaded)(**inputs(head, ids), **labels(head, ids))
    for key, value in results(head, output).items():
        assert torch.equal(getattr(again, key), value), key
    config = AutoConfig.from_pretrained(tmp_path)
    assert (config.is_decoder, config.is_encoder_decoder) == (model.config.is_decoder, model.config.is_encoder_decoder)


@each_head
def test_padding(name, head):
    """A head reads real tokens only, wherever the padding is; without labels it gives no loss."""
    model, ids = build(name, head), tokens(2, 7)
    with torch.no_grad():
        output = model(**inputs(head, ids))
        assert getattr(output, "loss", None) is None
        expected = results(head, output)
        for side, seed in itertools.product(("right", "left"), (None, 4)):
            padded, mask = pad(list(ids), 11, side, seed)
            output = results(head, model(**inputs(head, padded, mask)))
            for key, value in output.items():
                if key in PER_TOKEN or head in TOKEN_HEADS or (head, key) == ("ForSegmentReordering", "logits"):
                    value = value[mask.bool()].view_as(expected[key])
                close(value, expected[key])


@pytest.mark.parametrize("name", ["gpt2", "transformer_xl", "feedback_transformer"])
@pytest.mark.parametrize("head", ["Model", "ForSequenceClassification", "ForMultipleChoice"])
def test_a_decoder_without_a_mask_finds_the_last_token(name, head):
    """It is the last that is not `pad_token_id`, and one such token inside a text is a token as any other."""
    members, changes = family(name), {"add_pooler": head == "Model", "num_labels": 3}
    if head not in members:
        pytest.skip("the family has no such head")
    torch.manual_seed(0)
    config = config_class(name)(**tiny_fields(config_class(name), "decoder", is_decoder=True, **changes))
    model, ids = make_strong(members[head](config).double().eval()), tokens(2, 7)
    ids[1, 2] = config.pad_token_id
    padded, _ = pad(list(ids), 11, "right")

    def vectors(ids):
        output = model(**{"input_ids": inputs(head, ids)["input_ids"]})
        return output.pooler_output if head == "Model" else output.logits

    with torch.no_grad():
        close(vectors(padded), vectors(ids))
        nothing = torch.full((2, 3), config.pad_token_id)  # as transformers: the first
        assert vectors(nothing).isfinite().all()


FIRST = list({head: (name, head) for name, head in reversed(TESTED_HEADS)}.values())


@pytest.mark.parametrize(("name", "head"), [*FIRST, ("xf_tener", "ForTokenClassification")])
def test_weights_come_for_each_call(name, head):
    """Accelerate brings a module's weights for its calls alone."""
    model, ids = build(name, head, torch.float32), tokens(2, 7)
    with torch.no_grad():
        expected = results(head, model(**inputs(head, ids), **labels(head, ids)))
        output = cpu_offload(model, execution_device="cpu")(**inputs(head, ids), **labels(head, ids))
    for key, value in expected.items():
        close(getattr(output, key), value, 1e-5)
