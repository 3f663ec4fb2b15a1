"""The losses of distillation against sums written out in float64."""

import math

import pytest
import torch

from hf_xformers import (
    XFormerConfig,
    XFormerForCausalLM,
    XFormerForMaskedLM,
    XFormerForMultipleChoice,
    XFormerForPreTraining,
    XFormerForReplacedTokenPreTraining,
    XFormerForSequenceClassification,
)
from hf_xformers.compression.layer_maps import copied, patient, uniform
from hf_xformers.compression.methods import Pass, build_method
from hf_xformers.compression.passes import asked, own_heads, teacher_pass
from hf_xformers.compression.predictions import chosen_tokens, prediction_loss, softened_divergence
from hf_xformers.compression.teaching import PROJECTIONS, Teaching, probe
from hf_xformers.core import chunked_loss

VOCAB = 23
LOSSES = ("distilbert", "pkd", "tinybert", "mobilebert", "minilm")


def make(cls=XFormerForSequenceClassification, seed=0, layers=2, width=8, **changes):
    torch.manual_seed(seed)
    fields = {"vocab_size": VOCAB, "hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": 2}
    rates = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    sizes = {"intermediate_size": 12, "max_position_embeddings": 32, "num_labels": 3}
    model = cls(XFormerConfig(**{**fields, **rates, **sizes, **changes})).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.4 * torch.randn_like(parameter))
    return model


def rows(side="right", extra=0):
    """Texts of 7 and 4 tokens."""
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(1, VOCAB, (2, 7), generator=generator)
    mask = torch.ones_like(ids)
    mask[1, 4:] = 0
    ids = ids * mask
    if side == "left":
        ids, mask = (torch.stack([x[0], x[1].roll(3)]) for x in (ids, mask))
    if extra:
        pad = (extra, 0) if side == "left" else (0, extra)
        ids, mask = (torch.nn.functional.pad(x, pad) for x in (ids, mask))
    return {"input_ids": ids, "attention_mask": mask}


def seen(method, student, teacher, batch, progress=0.0, **options):
    """One pass of both, as the trainer makes it."""
    depths = student.config.num_hidden_layers, teacher.config.num_hidden_layers
    with own_heads(method, student, depths) as own:
        outputs = student(**batch, **asked(method))
    taught, theirs = teacher_pass(method, teacher, batch, depths)
    maps = getattr(student, PROJECTIONS, {})
    return Pass(batch, outputs, taught, student.config, own, theirs, maps, progress, **options)


def states_of(model, batch):
    """States before and after each layer, by hooks of this test's own."""
    found = []
    layers = model.model.trunk.layers
    hooks = [layers[0].register_forward_pre_hook(lambda m, a, k: found.append(a[0]), with_kwargs=True)]
    hooks += [layer.register_forward_hook(lambda m, a, result: found.append(result[0])) for layer in layers]
    with torch.no_grad():
        model(**batch)
    [hook.remove() for hook in hooks]
    return found


def scores_of(model, batch, layer):
    """[B, H, T, T]: q k / sqrt(d), by the projections of one layer and its input."""
    attention, found = model.model.trunk.layers[layer].attention, []
    hook = attention.register_forward_pre_hook(lambda m, a, k: found.append(a[0]), with_kwargs=True)
    with torch.no_grad():
        model(**batch)
        hook.remove()
        q, k, v = (
            getattr(attention, name)(found[0]).unflatten(-1, (2, -1)).transpose(1, 2)
            for name in ("q_proj", "k_proj", "v_proj")
        )
    return q @ k.mT / math.sqrt(q.shape[-1]), v


def real_softmax(scores, mask):
    return torch.softmax(scores.masked_fill(~mask[:, None, None, :].bool(), -math.inf), -1)


def kl_of_rows(taught, own, mask):
    """A mean over heads and real queries, pair by pair."""
    total, count = 0.0, 0
    for b, h, t in torch.cartesian_prod(*(torch.arange(n) for n in taught.shape[:3])).tolist():
        if mask[b, t]:
            p, q = taught[b, h, t], own[b, h, t]
            total += sum(float(x * (x / y).log()) for x, y in zip(p, q) if x > 0)
            count += 1
    return total / count


def mse(own, taught, mask):
    real = mask.bool()
    return float((own[real] - taught[real]).square().mean())


@pytest.mark.parametrize("side", ["right", "left"])
def test_distilbert(side):
    student, teacher, batch = make(seed=1, layers=1), make(seed=2), rows(side)
    method = build_method({"type": "distilbert", "temperature": 3.0})
    terms = method.terms(seen(method, student, teacher, batch))
    own, taught = (model(**batch).logits for model in (student, teacher))
    p, q = (torch.softmax(x / 3.0, -1) for x in (taught, own))
    assert float(terms["logits"]) == pytest.approx(5 * 9 * float((p * (p / q).log()).sum(-1).mean()), rel=1e-9)
    h, g = (model(**batch, output_hidden_states=True).hidden_states[-1] for model in (student, teacher))
    real = batch["attention_mask"].bool()
    cosines = (h * g).sum(-1) / h.norm(dim=-1) / g.norm(dim=-1)
    assert float(terms["cosine"]) == pytest.approx(1 - float(cosines[real].mean()), rel=1e-9)
    assert method.task_share(0.5) == 2.0


@pytest.mark.parametrize("cls, shift", [(XFormerForMaskedLM, 0), (XFormerForCausalLM, 1)])
@pytest.mark.parametrize("tokens", ["real", "labelled"])
def test_predictions_of_tokens(cls, shift, tokens):
    student, teacher, batch = make(cls, seed=1), make(cls, seed=2), rows()
    labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    labels[:, 1::2] = -100
    method = build_method({"type": "distilbert", "cosine_weight": 0, "logit_weight": 1, "tokens": tokens})
    found = method.terms(seen(method, student, teacher, {**batch, "labels": labels}, next_token=bool(shift)))
    own, taught = (model(**batch).logits for model in (student, teacher))
    total, count = 0.0, 0
    for b in range(2):
        for t in range(7 - shift):
            chosen = labels[b, t + shift] != -100 if tokens == "labelled" else batch["attention_mask"][b, t + shift]
            if chosen:
                p, q = torch.softmax(taught[b, t] / 2, 0), torch.softmax(own[b, t] / 2, 0)
                total, count = total + 4 * float((p * (p / q).log()).sum()), count + 1
    assert float(found["logits"]) == pytest.approx(total / count, rel=1e-9)


@pytest.mark.parametrize("every", [1, 3])
def test_many_predictions_are_compared_in_pieces(every, monkeypatch):
    """The same figure and gradient."""
    generator = torch.Generator().manual_seed(0)
    own, taught = (torch.randn(2, 7, 11, generator=generator) for _ in range(2))
    labels = torch.zeros(2, 7, dtype=torch.long)
    labels[:, torch.arange(7) % every != 0] = -100
    found = []
    for large in (1 << 24, 0):
        monkeypatch.setattr(chunked_loss, "_LARGE", large)
        logits = own.clone().requires_grad_()
        loss = prediction_loss({"logits": logits}, {"logits": taught}, {"labels": labels}, temperature=2.0)
        loss.backward()
        found.append((loss, logits.grad))
    torch.testing.assert_close(found[1], found[0])


def test_of_a_written_text_its_own_tokens_are_compared():
    """Also where the text that was read happens to be as long."""
    logits, labels = torch.zeros(1, 4, VOCAB), torch.tensor([[5, 6, -100, -100]])
    batch = {"attention_mask": torch.ones(1, 4), "decoder_input_ids": torch.ones(1, 4).long(), "labels": labels}
    assert chosen_tokens(batch, logits, everywhere=True).tolist() == [[True, True, False, False]]
    batch["decoder_attention_mask"] = torch.tensor([[1, 1, 1, 0]])
    del batch["labels"]
    assert chosen_tokens(batch, logits, everywhere=True).tolist() == [[True, True, True, False]]


@pytest.mark.parametrize("strategy", ["skip", "last"])
def test_pkd(strategy):
    student, teacher, batch = make(seed=1, layers=3), make(seed=2, layers=6), rows("left")
    method = build_method({"type": "pkd", "strategy": strategy, "alpha": 0.25, "beta": 7.0})
    terms = method.terms(seen(method, student, teacher, batch))
    own, taught = states_of(student, batch), states_of(teacher, batch)
    pairs = {"skip": [(1, 2), (2, 4)], "last": [(1, 4), (2, 5)]}[strategy]
    first = [0, 3]  # of texts that are padded on the left
    expected = 0.0
    for mine, other in pairs:
        for b in range(2):
            h, g = own[mine][b, first[b]], taught[other][b, first[b]]
            expected += float((h / h.norm() - g / g.norm()).square().sum()) / 2
    assert float(terms["states"]) == pytest.approx(7 * expected, rel=1e-9)
    assert method.task_share(0) == 0.75


def test_tinybert():
    """The scores of mapped layers where a real token sees a real one, states with a learned map, then predictions."""
    student, teacher, batch = make(seed=1, layers=2, width=4), make(seed=2, layers=4), rows()
    method = build_method({"type": "tinybert", "intermediate": 0.5, "hidden_weight": 3})
    Teaching(method, teacher).put(student)
    maps = {name: linear.double().weight for name, linear in getattr(student, PROJECTIONS).items()}
    assert {name: list(weight.shape) for name, weight in maps.items()} == {"embeddings": [8, 4], "states": [8, 4]}
    terms = method.terms(seen(method, student, teacher, batch, progress=0.4))
    own, taught, mask = states_of(student, batch), states_of(teacher, batch), batch["attention_mask"]
    assert float(terms["embeddings"]) == pytest.approx(mse(own[0] @ maps["embeddings"].T, taught[0], mask), rel=1e-9)
    states = sum(mse(own[m] @ maps["states"].T, taught[2 * m], mask) for m in (1, 2))
    assert float(terms["states"]) == pytest.approx(3 * states, rel=1e-9)
    attention = 0.0
    pairs = (mask[:, None, :, None] * mask[:, None, None, :]).bool().expand(2, 2, 7, 7)
    for mine, other in ((0, 1), (1, 3)):
        difference = scores_of(student, batch, mine)[0] - scores_of(teacher, batch, other)[0]
        attention += float(difference[pairs].square().mean())
    assert float(terms["attention"]) == pytest.approx(attention, rel=1e-9)
    late = method.terms(seen(method, student, teacher, batch, progress=0.5))
    p, q = (torch.softmax(model(**batch).logits, -1) for model in (teacher, student))
    assert set(late) == {"predictions"}
    assert float(late["predictions"]) == pytest.approx(-float((p * q.log()).sum(-1).mean()), rel=1e-9)


def test_mobilebert_and_minilm():
    student, teacher, batch = make(seed=1), make(seed=2, layers=4), rows("left")
    mask = batch["attention_mask"]
    method = build_method({"type": "mobilebert", "alpha": 0.25})
    terms = method.terms(seen(method, student, teacher, batch))
    own, taught = states_of(student, batch), states_of(teacher, batch)
    features = sum(mse(own[m], taught[2 * m], mask) for m in (1, 2))
    assert float(terms["features"]) == pytest.approx(features, rel=1e-9)
    attention = 0.0
    for mine, other in ((0, 1), (1, 3)):
        a, b = (real_softmax(scores_of(m, batch, i)[0], mask) for m, i in ((teacher, other), (student, mine)))
        attention += kl_of_rows(a, b, mask)
    assert float(terms["attention"]) == pytest.approx(attention, rel=1e-7)
    method = build_method("minilm")
    terms = method.terms(seen(method, student, teacher, batch))
    a, b = (real_softmax(scores_of(m, batch, i)[0], mask) for m, i in ((teacher, 3), (student, 1)))
    assert float(terms["attention"]) == pytest.approx(kl_of_rows(a, b, mask), rel=1e-7)
    relations = []
    for model, layer in ((teacher, 3), (student, 1)):
        v = scores_of(model, batch, layer)[1]
        relations.append(real_softmax(v @ v.mT / math.sqrt(v.shape[-1]), mask))
    assert float(terms["values"]) == pytest.approx(kl_of_rows(*relations, mask), rel=1e-7)


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("cls", [XFormerForSequenceClassification, XFormerForCausalLM])
def test_a_student_that_is_its_teacher_has_nothing_to_learn(name, cls):
    teacher, student = make(cls, seed=1), make(cls, seed=1)
    batch, method = rows(), build_method(name)
    terms = method.terms(seen(method, student, teacher, batch, next_token=cls is XFormerForCausalLM))
    assert terms and all(abs(float(term.detach())) < 1e-9 for term in terms.values())
    sum(terms.values()).backward()
    assert all(p.grad is None or float(p.grad.abs().max()) < 1e-7 for p in student.parameters())
    assert all(p.grad is None for p in teacher.parameters())


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("side", ["right", "left"])
def test_padding_moves_nothing(name, side):
    """Nor in rows of several texts."""
    method = build_method(name)
    for cls in (XFormerForSequenceClassification, XFormerForMultipleChoice):
        student, teacher = make(cls, seed=1), make(cls, seed=2, layers=4)
        probe(method, student, teacher)
        texts = [rows(side, extra) for extra in (0, 3)]
        if cls is XFormerForMultipleChoice:
            texts = [{key: value[None] for key, value in text.items()} for text in texts]
        one, other = (method.terms(seen(method, student, teacher, text)) for text in texts)
        for key in one:
            torch.testing.assert_close(one[key], other[key], rtol=1e-9, atol=1e-12)


def test_at_a_high_temperature_logits_are_matched():
    """The gradient becomes (z_S - z_T, both centred) / V (Hinton et al. 2015, equation 4)."""
    torch.manual_seed(0)
    own, taught = torch.randn(VOCAB, dtype=torch.float64, requires_grad=True), torch.randn(VOCAB, dtype=torch.float64)
    softened_divergence(own, taught, 1e5).backward()
    centred = [x - x.mean() for x in (own.detach(), taught)]
    torch.testing.assert_close(own.grad, (centred[0] - centred[1]) / VOCAB, rtol=1e-4, atol=1e-8)


def test_layer_maps():
    assert uniform(4, 12) == [3, 6, 9, 12] and build_method("tinybert").layers(4, 12) == {0: 2, 1: 5, 2: 8, 3: 11}
    assert patient(6, 12, "skip") == [2, 4, 6, 8, 10] and patient(6, 12, "last") == [7, 8, 9, 10, 11]
    assert copied("alternate", 6, 12) == [0, 2, 4, 6, 8, 10] and copied("last", 2, 5) == [3, 4]
    assert copied("first", 3, 3) == [0, 1, 2] and copied("0, 2", 2, 3) == [0, 2]
    for wrong, message in (("odd", "is 'first', 'last'"), ("0,9", "names layer 9"), ("0", "names 1 layers")):
        with pytest.raises(ValueError, match=message):
            copied(wrong, 2, 3)
    with pytest.raises(ValueError, match="4 layers and the teacher 3"):
        uniform(4, 3)


REFUSED = {
    "another mechanism": ("minilm", {"attention": "performer"}, {}, "'performer' of the student hands out no"),
    "no scores": ("tinybert", {"attention": "sliding_window"}, {}, "compares the scores under a softmax"),
    "heads": ("mobilebert", {"num_attention_heads": 4}, {}, "give the student as many"),
    "depth": ("pkd", {"layers": 5}, {}, "5 layers and the teacher 4"),
    "no logits": ("distilbert", {"cls": XFormerForPreTraining}, {"cls": XFormerForPreTraining}, "and no `logits`"),
    "own text": (
        "distilbert",
        {"cls": XFormerForReplacedTokenPreTraining},
        {"cls": XFormerForReplacedTokenPreTraining},
        "puts other tokens into its own",
    ),
    "teacher layer": ({"type": "minilm", "teacher_layer": 7}, {}, {}, "teacher_layer 7 does not exist"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_models_that_cannot_be_compared(name):
    method, own, theirs, message = REFUSED[name]
    student, teacher = make(**own), make(**{"layers": 4, **theirs})
    with pytest.raises(ValueError, match=message):
        probe(build_method(method), student, teacher)


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"type": "distilbert", "logit_weight": 0, "cosine_weight": 0}, "teach nothing"),
        ({"type": "distillbert"}, "Did you mean 'distilbert'"),
        ({"type": "pkd", "gamma": 1}, "Unknown field 'gamma'"),
    ],
)
def test_settings_that_make_no_sense(fields, message):
    with pytest.raises(ValueError, match=message):
        build_method(fields)
