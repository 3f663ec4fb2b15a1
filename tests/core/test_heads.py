"""Heads: pooling, the language-model head's formula, refusals, tasks of a sequence classifier."""

import math

import pytest
import torch
import torch.nn.functional as F
from peft import PrefixTuningConfig, get_peft_model

from hf_xformers import (
    XFormerConfig,
    XFormerForCausalLM,
    XFormerForMaskedLM,
    XFormerForMultipleChoice,
    XFormerForNextSentencePrediction,
    XFormerForPreTraining,
    XFormerForQuestionAnswering,
    XFormerForSeq2SeqLM,
    XFormerForSequenceClassification,
    XFormerForTokenClassification,
)
from hf_xformers.configuration_image import XFormerImageConfig
from hf_xformers.core.pooling import Pooler, pool
from hf_xformers.modeling.image import XFormerForImageClassification
from hf_xformers.modeling.phrase_contrast import XFormerForPhraseContrast
from hf_xformers.modeling.text_contrast import XFormerForTextContrast
from tests.helpers import close, make_strong, pad, tokens

SMALL = dict(vocab_size=40, hidden_size=16, num_attention_heads=4, num_hidden_layers=1, intermediate_size=16)
MASK = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0], [0, 0, 1, 1], [0, 0, 0, 0]])


def build(model_class, **fields):
    torch.manual_seed(0)
    return make_strong(model_class(XFormerConfig(**SMALL, **fields)).double().eval())


def test_pooling():
    states = torch.randn(4, 4, 3, dtype=torch.float64)
    assert torch.equal(pool(states, MASK, "first")[:3], states[[0, 1, 2], [0, 0, 2]])
    assert torch.equal(pool(states, MASK, "last")[:3], states[[0, 1, 2], [3, 1, 3]])
    means = torch.stack([states[0].mean(0), states[1, :2].mean(0), states[2, 2:].mean(0), torch.zeros(3).double()])
    close(pool(states, MASK, "mean"), means)
    assert all(pool(states, MASK, how).isfinite().all() for how in ("first", "mean", "last"))
    assert torch.equal(pool(states, None, "first"), states[:, 0])
    assert torch.equal(pool(states, None, "last"), states[:, -1])
    close(pool(states, None, "mean"), states.mean(1))
    many = torch.full((1, 8192, 1), 16.0, dtype=torch.float16)  # the sum of which is beyond the type's range
    assert pool(many, torch.ones(1, 8192), "mean").item() == 16


def test_pooler():
    """tanh(W h + b) of the first real token."""
    module = make_strong(Pooler(XFormerConfig(**SMALL)).double())
    states = torch.randn(4, 4, 16, dtype=torch.float64)
    for mask, places in ((None, [0, 0, 0, 0]), (MASK.bool(), [0, 0, 2, 0])):
        output = module(states, mask)
        for row, place in enumerate(places):
            close(output[row], torch.tanh(module.dense.weight @ states[row, place] + module.dense.bias))


@pytest.mark.parametrize("how", ["first", "mean", "last"])
@pytest.mark.parametrize("decoder", [False, True])
def test_classifier_pooling(how, decoder):
    if decoder and how == "first":
        for model_class in (XFormerForSequenceClassification, XFormerForMultipleChoice):
            with pytest.raises(ValueError, match="the decoder of .* lets that read nothing else; take 'last'"):
                build(model_class, classifier_pooling=how, is_decoder=True)
        return
    model = build(XFormerForSequenceClassification, classifier_pooling=how, is_decoder=decoder)
    ids, mask = tokens(3, 4, high=40), MASK[:3]
    states = model.model(ids, attention_mask=mask).last_hidden_state
    close(model(ids, attention_mask=mask).logits, model.classifier(pool(states, mask, how)))


def test_losses_of_labels():
    """In float32 whatever the model's type is; of several labels as integers; none of a batch without a label."""
    ids = tokens(3, 4, high=40)
    model = build(XFormerForSequenceClassification, num_labels=3, problem_type="multi_label_classification")
    labels = torch.tensor([[1, 0, 1], [0, 0, 0], [1, 1, 1]])
    several = model(ids, labels=labels)
    close(several.loss, F.binary_cross_entropy_with_logits(several.logits, labels.to(several.logits)))
    for problem, given in (("single_label_classification", [0, 2, -100]), ("regression", [[4, 5, 6]] * 3)):
        model = build(XFormerForSequenceClassification, num_labels=3, problem_type=problem).bfloat16()
        found, given = model(ids, labels=torch.tensor(given)), torch.tensor(given)
        wide = found.logits.float()
        wanted = F.cross_entropy(wide, given) if given.ndim == 1 else F.mse_loss(wide, given.float())
        assert found.loss.dtype == torch.float32
        close(found.loss, wanted)
    model = build(XFormerForSequenceClassification, num_labels=3)
    none = model(ids, labels=torch.full((3,), -100)).loss
    none.backward()
    assert none == 0 and not any(
        parameter.grad.any() for parameter in model.parameters() if parameter.grad is not None
    )


def test_every_pass_is_regularized():
    """Auxiliary losses of a head that reads further texts are of all that the model reads."""
    ids, others = tokens(2, 6, high=40), tokens(2, 4, seed=1, high=40)
    for model_class, labels, name in (
        (XFormerForTextContrast, torch.zeros(2, dtype=torch.long), "second_input_ids"),
        (XFormerForPhraseContrast, ids, "phrase_input_ids"),
    ):
        model = build(model_class, feedforward="switch")
        expected = sum(model.model(each).aux_losses["router_balance"] for each in (ids, others))
        close(model(ids, labels=labels, **{name: others}).aux_losses["router_balance"], expected)


def test_automatic_pooling():
    """A causal model has read the text only at its end; BERT's pooler comes before either."""
    ids = tokens(2, 4, high=40)
    for fields, place in (({}, 0), ({"is_decoder": True}, -1)):
        model = build(XFormerForSequenceClassification, **fields)
        close(model(ids).logits, model.classifier(model.model(ids).last_hidden_state[:, place]))
    model = build(XFormerForSequenceClassification, add_pooler=True)
    close(model(ids).logits, model.classifier(model.model(ids).pooler_output))


@pytest.mark.parametrize("kind", ["dense", "dense_norm"])
@pytest.mark.parametrize("bias", [True, False])
def test_classifier_transform(kind, bias):
    """relu(W h + b) and its norm stand before the labels of every head, after pooling or (`late_mean`) before it."""
    fields = {"classifier_transform": kind, "classifier_activation": "relu", "classifier_bias": bias}
    ids, mask = tokens(3, 4, high=40), MASK[:3]

    def hidden(model, x):
        y = x @ model.transform.dense.weight.t()
        y = (y if model.transform.dense.bias is None else y + model.transform.dense.bias).clamp(min=0)
        if kind == "dense":
            return y
        y = y - y.mean(-1, keepdim=True)
        y = y / (y.square().mean(-1, keepdim=True) + model.config.layer_norm_eps).sqrt()
        return y * model.transform.norm.weight + model.transform.norm.bias

    def labels(model, x):
        return x @ model.classifier.weight.t() + model.classifier.bias

    for model_class in (XFormerForTokenClassification, XFormerForQuestionAnswering):
        model = build(model_class, **fields)
        assert (model.transform.dense.bias is not None) == bias
        states = model.model(ids, attention_mask=mask).last_hidden_state
        found = model(ids, attention_mask=mask)
        if model_class is XFormerForTokenClassification:
            close(found.logits, labels(model, hidden(model, states)))
        else:
            close(torch.stack([found.start_logits, found.end_logits], -1), labels(model, hidden(model, states)))
    for how in ("first", "mean", "late_mean"):
        model = build(XFormerForSequenceClassification, **fields, classifier_pooling=how)
        states = model.model(ids, attention_mask=mask).last_hidden_state
        late = how == "late_mean"
        vector = pool(hidden(model, states), mask, "mean") if late else hidden(model, pool(states, mask, how))
        close(model(ids, attention_mask=mask).logits, labels(model, vector))
    model = build(XFormerForMultipleChoice, **fields, add_pooler=True)
    pairs, seen = tokens(6, 4, high=40).view(3, 2, 4), mask[:, None].expand(3, 2, 4)
    vector = model.model(pairs.flatten(0, 1), attention_mask=seen.flatten(0, 1)).pooler_output
    close(model(pairs, attention_mask=seen).logits, labels(model, hidden(model, vector)).view(3, 2))
    model = build(XFormerForSequenceClassification, **fields, is_encoder_decoder=True)
    base = model.model(ids, attention_mask=mask, decoder_input_ids=ids, decoder_attention_mask=mask)
    found = model(ids, attention_mask=mask, decoder_input_ids=ids, decoder_attention_mask=mask).logits
    close(found, labels(model, hidden(model, pool(base.last_hidden_state, mask, "last"))))


def test_decoder_inputs_that_are_vectors_have_a_mask():
    model, ids = build(XFormerForSequenceClassification, is_encoder_decoder=True), tokens(3, 4, high=40)
    given = {"attention_mask": torch.ones_like(ids), "decoder_attention_mask": MASK[:3]}
    expected = model(ids, decoder_input_ids=ids, **given).logits
    close(model(ids, decoder_inputs_embeds=model.get_input_embeddings()(ids), **given).logits, expected)


@pytest.mark.parametrize("decoder", [False, True])
@pytest.mark.parametrize(
    "task, model_class",
    [
        ("SEQ_CLS", XFormerForSequenceClassification),
        ("TOKEN_CLS", XFormerForTokenClassification),
        ("QUESTION_ANS", XFormerForQuestionAnswering),
    ],
)
def test_a_text_behind_a_prefix_of_peft(task, model_class, decoder):
    for pooler in (False, True):
        model = build(model_class, is_decoder=decoder, add_pooler=pooler)
        model = get_peft_model(model, PrefixTuningConfig(task_type=task, num_virtual_tokens=3)).double().eval()
        ids = tokens(2, 4, high=40)
        alone = model(input_ids=ids, attention_mask=torch.ones_like(ids))[0]
        for side in ("left", "right"):
            padded, mask = pad(list(ids), 6, side)
            found = model(input_ids=padded, attention_mask=mask)[0]
            close(found if task == "SEQ_CLS" else found[mask == 1].view_as(alone), alone)


def test_two_objectives_pass_on_a_memory():
    fields = {"stack": "segment_recurrent", "attention": "transformer_xl", "position": "none"}
    model, ids = build(XFormerForPreTraining, **fields), tokens(2, 8, high=40)
    whole = model(ids, segment_memory=model(ids[:, :4]).segment_memory)
    assert whole.segment_memory.length == 12


def test_images_have_the_transform():
    fields = {"image_size": 4, "patch_size": 2, "classifier_transform": "dense", "classifier_activation": "gelu_new"}
    sizes = {key: value for key, value in SMALL.items() if key != "vocab_size"}
    pixels = torch.randn(2, 3, 4, 4, dtype=torch.float64)
    for how in ("first", "mean", "late_mean"):
        torch.manual_seed(0)
        config = XFormerImageConfig(**sizes, **fields, classifier_pooling=how)
        model = make_strong(XFormerForImageClassification(config).double().eval())
        states = model.model(pixels).last_hidden_state
        patches = states[:, config.embedding.leading_tokens :]
        vector = {
            "first": lambda s=states, m=model: m.transform(s[:, 0]),
            "mean": lambda p=patches, m=model: m.transform(p.mean(1)),
            "late_mean": lambda p=patches, m=model: m.transform(p).mean(1),
        }[how]()
        close(model(pixels).logits, model.classifier(vector))


def test_who_has_no_transform():
    transform = {"classifier_transform": "dense"}
    for model_class in (XFormerForNextSentencePrediction, XFormerForPreTraining):
        with pytest.raises(ValueError, match="without a hidden layer, got `classifier_transform='dense'`"):
            build(model_class, **transform)


def test_a_decoders_pooler_reads_the_last_token():
    """The first has read nothing of the text."""
    model, ids = build(XFormerForSequenceClassification, add_pooler=True, is_decoder=True), tokens(2, 4, high=40)
    mask = torch.tensor([[1, 1, 1, 0], [0, 1, 1, 1]])
    states, dense = model.model(ids, attention_mask=mask).last_hidden_state, model.model.pooler.dense
    vector = torch.stack([states[0, 2], states[1, 3]])
    close(model(ids, attention_mask=mask).logits, model.classifier(torch.tanh(dense(vector))))


IDS = torch.zeros(2, 3, dtype=torch.long)


@pytest.mark.parametrize(
    ("model_class", "given", "message"),
    [
        (
            XFormerForMaskedLM,
            {"input_ids": IDS[0]},
            r"`input_ids` must be \[batch, length\], got \[3\]; a batch of one",
        ),
        (XFormerForCausalLM, {"input_ids": IDS[None]}, r"got \[1, 2, 3\]; give one text per row"),
        (
            XFormerForMaskedLM,
            {"inputs_embeds": torch.zeros(3, 16)},
            r"`inputs_embeds` must be \[batch, length, width\]",
        ),
        (XFormerForMaskedLM, {"input_ids": IDS, "labels": IDS[0]}, r"`labels` must be .* = \[2, 3\].*got \[3\]"),
        (XFormerForCausalLM, {"input_ids": IDS, "labels": IDS[:, :2]}, r"`labels` must be .*got \[2, 2\]"),
        (XFormerForSeq2SeqLM, {"input_ids": IDS, "labels": IDS[0]}, r"`labels` must be \[batch, length\], got \[3\]"),
        (
            XFormerForSeq2SeqLM,
            {"input_ids": IDS, "decoder_input_ids": IDS[0]},
            r"must be \[batch, length\], got \[3\]",
        ),
        (
            XFormerForMaskedLM,
            {"input_ids": IDS, "attention_mask": IDS[0]},
            r"`attention_mask` must be \[batch, length\]",
        ),
    ],
)
def test_axes(model_class, given, message):
    with pytest.raises(ValueError, match=message):
        build(model_class)(**given)


def gelu(x):
    return x * 0.5 * (1 + torch.erf(x / math.sqrt(2)))


def test_language_model_heads():
    """logits = W t(scale h) + b, W the token table."""
    ids = tokens(2, 4, high=40)
    model = build(XFormerForMaskedLM, head={"type": "linear", "bias": True})
    states, head = model.model(ids).last_hidden_state, model.lm_head
    table = model.get_input_embeddings().weight
    close(model(ids).logits, states @ table.T + head.decoder.bias)
    model = build(XFormerForMaskedLM, head={"type": "linear", "scale": True})
    states, table = model.model(ids).last_hidden_state, model.get_input_embeddings().weight
    close(model(ids).logits, states @ table.T / 4)
    model = build(XFormerForMaskedLM, head="transform")
    states, head, table = model.model(ids).last_hidden_state, model.lm_head, model.get_input_embeddings().weight
    inner = gelu(states @ head.dense.weight.T + head.dense.bias)
    inner = (inner - inner.mean(-1, keepdim=True)) / (inner.var(-1, unbiased=False, keepdim=True) + 1e-5).sqrt()
    inner = inner * head.norm.weight + head.norm.bias
    close(model(ids).logits, inner @ table.T + head.decoder.bias)


def test_embedding():
    """scale * E[w] + type, normalised, in that order."""
    fields = {
        "embedding": {"type": "token", "scale": True, "normalize": True},
        "type_vocab_size": 2,
        "position": "none",
    }
    model = build(XFormerForMaskedLM, **fields)
    ids, kinds = tokens(2, 4, high=40), tokens(2, 4, low=0, high=2)
    embedding = model.model.trunk.embedding
    expected = embedding.tokens.weight[ids] * 4 + embedding.types.weight[kinds]
    mean, variance = expected.mean(-1, keepdim=True), expected.var(-1, unbiased=False, keepdim=True)
    expected = (expected - mean) / (variance + 1e-5).sqrt() * embedding.norm.weight + embedding.norm.bias
    states = model.model(ids, token_type_ids=kinds, output_hidden_states=True).hidden_states[0]
    close(states, expected)


def test_a_factor_in_place_of_the_scale():
    """On vectors that are given, too; the factor 1, which Python takes for True, is none."""
    fields = {"embedding": {"type": "token", "scale": 3}, "head": {"type": "linear", "scale": 0.5}, "position": "none"}
    model = build(XFormerForMaskedLM, **fields)
    ids, table = tokens(2, 4, high=40), model.get_input_embeddings().weight
    for given in ({"input_ids": ids}, {"inputs_embeds": table[ids]}):
        found = model(**given, output_hidden_states=True)
        close(found.hidden_states[0], 3 * table[ids])
        close(found.logits, 0.5 * model.model(**given).last_hidden_state @ table.T)
    for slot, name in (("embedding", "token"), ("head", "linear")):
        made = XFormerConfig(**SMALL, **{slot: {"type": name, "scale": 1}})
        assert getattr(made, slot).scale is False
        with pytest.raises(ValueError, match=f"{name} needs `scale` > 0, or True or False, got 0"):
            XFormerConfig(**SMALL, **{slot: {"type": name, "scale": 0}})


@pytest.mark.parametrize(
    ("problem", "labels"),
    [
        ("single_label_classification", torch.tensor([2, 0])),
        ("multi_label_classification", torch.tensor([[1.0, 0, 1], [0, 0, 1]], dtype=torch.float64)),
        ("regression", torch.tensor([[0.5, 1, 2], [0, 0, 1]], dtype=torch.float64)),
    ],
)
def test_kinds_of_classification(problem, labels):
    model, ids = build(XFormerForSequenceClassification, num_labels=3, problem_type=problem), tokens(2, 4, high=40)
    output = model(ids, labels=labels)
    logits = output.logits
    if problem == "regression":
        expected = (logits - labels).pow(2).mean()
    elif problem == "single_label_classification":
        expected = -(logits.log_softmax(-1)[[0, 1], labels]).mean()
    else:
        chance = logits.sigmoid()
        expected = -(labels * chance.log() + (1 - labels) * (1 - chance).log()).mean()
    close(output.loss, expected, 1e-6)


def test_question_answering_loss():
    model, ids = build(XFormerForQuestionAnswering), tokens(2, 6, high=40)
    output = model(ids, start_positions=torch.tensor([1, 9]), end_positions=torch.tensor([3, 2]))
    start, end = output.start_logits.log_softmax(-1), output.end_logits.log_softmax(-1)
    assert output.start_logits.shape == (2, 6)
    expected = (-start[0, 1] - (end[0, 3] + end[1, 2]) / 2) / 2  # a start beyond the text is ignored
    close(output.loss, expected, 1e-6)
    beyond = torch.tensor([6, 9])
    output = model(ids, start_positions=beyond, end_positions=beyond)  # no answer stands in any text of the batch
    output.loss.backward()
    assert output.loss == 0 and all(parameter.grad.isfinite().all() for parameter in model.classifier.parameters())


def test_multiple_choice():
    """Each choice is scored alone; the softmax is over the choices of a row."""
    model, ids = build(XFormerForMultipleChoice), tokens(2, 3, 5, high=40)
    mask = torch.ones_like(ids)
    mask[1, 2, 3:] = 0
    output = model(ids, attention_mask=mask, labels=torch.tensor([2, 0]))
    for row in range(2):
        for choice in range(3):
            length = int(mask[row, choice].sum())
            states = model.model(ids[row, choice, :length][None]).last_hidden_state
            close(output.logits[row, choice], model.classifier(states[:, 0])[0, 0])
    close(output.loss, -(output.logits.log_softmax(-1)[[0, 1], [2, 0]]).mean())
    assert model(ids, labels=torch.tensor([-100, -100])).loss == 0
    with pytest.raises(ValueError, match=r"\[batch, choices, length\]"):
        model(ids[:, 0])


@pytest.mark.parametrize("model_class", [XFormerForTokenClassification, XFormerForMultipleChoice])
def test_two_towers_are_refused(model_class):
    with pytest.raises(ValueError, match=f"{model_class.__name__} reads one sequence; .*`is_encoder_decoder=False`"):
        model_class(XFormerConfig(**SMALL, is_encoder_decoder=True))


def test_an_encoder_loads_into_another_head(tmp_path):
    """Pretrain, then fine-tune: the body is found again, only the new head starts afresh."""
    model = build(XFormerForMaskedLM, num_labels=3).float()
    model.save_pretrained(tmp_path)
    loaded, report = XFormerForSequenceClassification.from_pretrained(tmp_path, output_loading_info=True)
    assert set(report["missing_keys"]) == {"classifier.weight", "classifier.bias"}
    for name, parameter in model.model.named_parameters():
        assert torch.equal(parameter, dict(loaded.model.named_parameters())[name]), name


def test_ids_that_are_never_predicted(tmp_path):
    """The last two of 40 ids have no logits; losses and texts are those of a vocabulary that ends before them."""
    fields = dict(vocab_size=40, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16)
    torch.manual_seed(0)
    config = XFormerConfig(**fields, head={"type": "linear", "unpredicted": 2}, tie_word_embeddings=False)
    model = XFormerForCausalLM(config).eval()
    ids = torch.tensor([[39, 5, 9, 30, 37]])
    output = model(input_ids=ids, labels=ids)
    assert output.logits.shape == (1, 5, 38) and model.lm_head.decoder.weight.shape == (38, 16)
    expected = torch.nn.functional.cross_entropy(output.logits[0, :-1], ids[0, 1:])
    torch.testing.assert_close(output.loss, expected)
    for beams in (1, 3):
        assert model.generate(ids, max_new_tokens=6, num_beams=beams, do_sample=False)[:, 5:].max() < 38
    model.save_pretrained(tmp_path)
    again = XFormerForCausalLM.from_pretrained(tmp_path).eval()
    assert torch.equal(again(input_ids=ids).logits, output.logits)
    for size in ({"new_num_tokens": 48}, {"pad_to_multiple_of": 16}):
        with pytest.raises(ValueError, match="of 40 cannot become one of 48: the head predicts the first 38"):
            model.resize_token_embeddings(**size)
