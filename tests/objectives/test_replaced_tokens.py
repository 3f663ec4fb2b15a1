"""Replaced token detection: noise and draws against golden rows and frequencies, the joint loss by hand, what shares
weights and gradients, what comes out as a model of its own."""

import math

import pytest
import torch

from hf_xformers import XFElectraConfig, XFElectraForReplacedTokenPreTraining, XFormerConfig
from hf_xformers.modeling.replaced_token_pretraining import sample_tokens
from hf_xformers.objectives import build_objective
from hf_xformers.objectives.replaced_tokens import (
    ReplacementNoise,
    apply_noise,
    num_draws,
    replace_tokens,
    sample_noise,
)
from hf_xformers.training.evaluation import scored
from hf_xformers.variants import family
from tests.helpers import close, make_strong, tokens

SIZES = dict(vocab_size=40, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48)
QUIET = dict(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)


def build(**fields):
    torch.manual_seed(0)
    return XFElectraForReplacedTokenPreTraining(XFElectraConfig(**SIZES, **QUIET, **fields)).double()


def test_golden():
    ids = torch.tensor([2, 10, 11, 12, 3])
    noise = ReplacementNoise(torch.tensor([1, 3]), torch.tensor([True, False]), torch.zeros(2))
    assert apply_noise(ids, noise, 4).tolist() == [2, 4, 11, 12, 3]
    read, labels = replace_tokens(ids, noise.positions, torch.tensor([10, 77]))
    assert read.tolist() == [2, 10, 11, 77, 3] and labels.tolist() == [0, 0, 0, 1, 0]


def test_how_many_are_drawn():
    """Drawn with replacement, 19 of 125 give 17.69 different ones."""
    assert [num_draws(n, 0.15) for n in (1, 3, 7, 128)] == [1, 1, 1, 19]
    special = torch.zeros(127, dtype=torch.bool)
    special[[0, 126]] = True
    objective, runs = build_objective("replaced_token_detection"), 600
    found = [sample_noise(special, objective, torch.Generator().manual_seed(seed)) for seed in range(runs)]
    distinct = torch.tensor([len(noise.positions) for noise in found], dtype=torch.float64)
    expected = 125 * (1 - (1 - 1 / 125) ** 19)
    assert abs(expected - 17.69) < 0.01
    assert abs(distinct.mean() - expected) < 4 * distinct.std() / math.sqrt(runs)
    masked = torch.cat([noise.masked for noise in found]).double()
    assert abs(masked.mean() - 0.85) < 4 * math.sqrt(0.85 * 0.15 / len(masked))
    assert not any(special[noise.positions].any() for noise in found)
    objective = build_objective({"type": "rtd", "with_replacement": False})
    assert len(sample_noise(special, objective, torch.Generator()).positions) == 19
    assert not len(sample_noise(torch.ones(4, dtype=torch.bool), objective, torch.Generator()).positions)


@pytest.mark.parametrize("side", ["right", "left"])
def test_batches(bert_tokenizer, side):
    """What is masked is drawn, its label is the row's token, and a row's noise knows nothing of its neighbours."""
    bert_tokenizer.padding_side = side
    rows = [[2, *range(5, 35), 3], [2, 30, 31, 3], [2, 3]]
    collate = build_objective("replaced_token_detection").collator(bert_tokenizer)
    batch = collate([{"input_ids": row} for row in rows])
    assert batch["target_positions"].shape == (3, num_draws(32, 0.15))
    for index, row in enumerate(rows):
        real = batch["attention_mask"][index].bool()
        assert batch["labels"][index][real].tolist() == row and (batch["labels"][index][~real] == -100).all()
        changed = (batch["input_ids"][index] == 4).nonzero().flatten().tolist()
        places = batch["target_positions"][index]
        assert set(changed) <= set(places[places >= 0].tolist())
        assert all(batch["labels"][index][place] >= 5 for place in places[places >= 0])
        alone = collate([{"input_ids": row}])
        assert alone["input_ids"][0].tolist() == batch["input_ids"][index][real].tolist()
        kept = int((places >= 0).sum())
        assert torch.equal(alone["sampling_draws"][0][:kept], batch["sampling_draws"][index][:kept])
    bert_tokenizer.padding_side = "right"


def test_draws_follow_the_distribution():
    logits = torch.tensor([0.3, -1.0, 1.2, 0.0, 0.7])
    draws = torch.rand(20000, generator=torch.Generator().manual_seed(0))
    for temperature, original in ((1.0, None), (0.5, None), (1.0, 2)):
        share = logits / temperature
        if original is not None:
            share = share.index_fill(0, torch.tensor([original]), -math.inf)
        share = share.softmax(-1)
        avoided = None if original is None else torch.full((20000,), original)
        drawn = sample_tokens(logits.expand(20000, -1), draws, temperature, avoided)
        found = torch.bincount(drawn, minlength=5) / 20000
        assert ((found - share).abs() <= 4 * (share * (1 - share) / 20000).sqrt()).all()
    cold = sample_tokens(logits.expand(100, -1), draws[:100], 1e-4)
    assert (cold == 2).all()


def test_loss_by_hand():
    """Both losses written out; the detection's mean is over every real token, not over the masked ones alone."""
    model = make_strong(build(pretraining={"replaced_tokens": {"generator_size": 0.5}}).eval())
    ids = tokens(2, 8, high=40)
    mask = torch.tensor([[1] * 8, [1] * 5 + [0] * 3])
    places, draws = torch.tensor([[1, 4, 6], [2, -1, -1]]), torch.tensor([[0.1, 0.6, 0.9], [0.4, 0.2, 0.2]])
    masked, labels = ids.clone(), ids.masked_fill(mask == 0, -100)
    masked[0, 1] = masked[0, 6] = masked[1, 2] = 4
    given = {"attention_mask": mask, "labels": labels, "target_positions": places, "sampling_draws": draws}
    output = model(masked, **given)
    scores = model.generator(masked, attention_mask=mask).logits.log_softmax(-1)
    read, predicted = ids.clone(), []
    for row, place, draw in ((0, 1, 0.1), (0, 4, 0.6), (0, 6, 0.9), (1, 2, 0.4)):
        predicted.append(-scores[row, place, ids[row, place]])
        total = 0.0
        for word in range(40):
            total += float(scores[row, place, word].detach().exp())
            if total > draw:
                read[row, place] = word
                break
    replaced = read != ids
    judged = model(read, attention_mask=mask).logits
    found = []
    for row in range(2):
        for place in range(8):
            if mask[row, place]:
                chance = torch.sigmoid(judged[row, place])
                found.append(-torch.log(chance if replaced[row, place] else 1 - chance))
    generator, detection = torch.stack(predicted).mean(), torch.stack(found).mean()
    assert len(found) == 13 and replaced.any()
    close(output.aux_losses["generator"], generator)
    close(output.loss, generator + 50 * detection)
    close(output.logits, judged)
    assert output.targets.tolist() == replaced.long().masked_fill(mask == 0, -100).tolist()
    close(model(masked, **given, num_items_in_batch=26).loss, 0.5 * output.loss)
    logits, targets = scored(output, labels)
    close(logits.log_softmax(-1)[0, 0, 1], torch.nn.functional.logsigmoid(judged[0, 0]))
    assert torch.equal(targets, output.targets)


def test_a_detector_that_knows_nothing_has_ln_2():
    model = build()
    torch.nn.init.zeros_(model.classifier.weight), torch.nn.init.zeros_(model.classifier.bias)
    ids = tokens(2, 8, high=40)
    output = model(ids.index_fill(1, torch.tensor([3]), 4), labels=ids)
    close((output.loss - output.aux_losses["generator"]) / 50, torch.tensor(math.log(2), dtype=torch.float64))


@pytest.mark.parametrize("sharing", ["tied", "gradient_disentangled", "untied"])
def test_who_learns_from_the_detection(sharing):
    """No gradient of the detection reaches the generator but through a table that both read."""
    settings = {"generator_sharing": sharing, "generator_size": 0.5}
    model = build(pretraining={"replaced_tokens": settings}).train()
    ids = tokens(2, 8, high=40)
    output = model(ids.index_fill(1, torch.tensor([3]), 4), labels=ids)
    (output.loss - output.aux_losses["generator"]).backward()
    mine, theirs = model.get_input_embeddings().weight, model.generator.get_input_embeddings().weight
    assert (mine is theirs) == (sharing == "tied") and mine.grad.abs().sum() > 0
    for name, parameter in model.generator.named_parameters():
        learns = parameter.grad is not None and bool(parameter.grad.abs().sum() > 0)
        own_table = any(parameter is other for other in model.model.parameters())
        assert learns == (sharing == "tied" and own_table), name
    if sharing == "gradient_disentangled":
        assert float(mine.detach().abs().sum()) == 0.0
        ids = tokens(1, 5, high=40)
        embedded = theirs.detach()[ids]
        close(model.eval()(ids).logits, super(type(model), model).forward(inputs_embeds=embedded).logits)


@pytest.mark.parametrize("sharing", ["tied", "gradient_disentangled", "untied"])
def test_both_come_out_as_ordinary_models(sharing, tmp_path):
    from transformers import AutoModel, AutoModelForMaskedLM

    model = make_strong(build(pretraining={"replaced_tokens": {"generator_sharing": sharing}}).eval()).float()
    ids = tokens(2, 7, high=40)
    model.save_pretrained(tmp_path / "both")
    again = type(model).from_pretrained(tmp_path / "both").eval()
    close(again(ids).logits, model(ids).logits, 1e-6)
    model.extract("generator").save_pretrained(tmp_path / "generator")
    generator = AutoModelForMaskedLM.from_pretrained(tmp_path / "generator").eval()
    close(generator(ids).logits, model.generator(ids).logits, 1e-6)
    model.extract().save_pretrained(tmp_path / "discriminator")
    detector = family("xf_electra")["ForReplacedTokenDetection"].from_pretrained(tmp_path / "discriminator").eval()
    close(detector(ids).logits, model(ids).logits, 1e-6)
    trunk = AutoModel.from_pretrained(tmp_path / "discriminator").eval()
    close(trunk(ids).last_hidden_state, detector.model(ids).last_hidden_state, 1e-6)
    with pytest.raises(ValueError, match="'generator' and a 'discriminator' to extract, not 'head'"):
        model.extract("head")


def test_sampling_without_draws():
    """In evaluation the same every time; in training from torch's generator."""
    model = build().eval()
    ids = tokens(2, 8, high=40)
    masked = ids.index_fill(1, torch.tensor([1, 3, 5]), 4)
    assert torch.equal(model(masked, labels=ids).targets, model(masked, labels=ids).targets)
    model.train()
    assert len({tuple(model(masked, labels=ids).targets.flatten().tolist()) for _ in range(20)}) > 1


def test_resizing_keeps_the_tables_one():
    model = build()
    model.resize_token_embeddings(44)
    assert model.get_input_embeddings().weight is model.generator.get_input_embeddings().weight
    assert model.generator.config.vocab_size == model.config.vocab_size == 44
    ids = torch.full((1, 5), 43)
    assert model(ids.index_fill(1, torch.tensor([2]), 4), labels=ids).loss.isfinite()


def test_settings_of_the_generator_are_checked_in_both_places():
    with pytest.raises(ValueError, match="`generator_size` in"):
        XFormerConfig(**SIZES, pretraining={"replaced_tokens": {"generator_size": 0}})
    with pytest.raises(ValueError, match="`generator_size` in"):
        build_objective({"type": "rtd", "generator_size": 0})


def test_refused_models(gpt_tokenizer):
    with pytest.raises(ValueError, match="set `tie_word_embeddings=True`, or"):
        build(tie_word_embeddings=False)
    with pytest.raises(ValueError, match="has no mask token"):
        build_objective("rtd").collator(gpt_tokenizer)


@pytest.mark.parametrize(("name", "count"), [("small", 13549057), ("base", 109483009), ("large", 335142913)])
def test_published_sizes(name, count):
    config = XFElectraConfig(**XFElectraConfig.presets[name])
    with torch.device("meta"):
        assert family("xf_electra")["ForReplacedTokenDetection"](config).num_parameters() == count
    with torch.device("meta"):
        generator = XFElectraForReplacedTokenPreTraining(config).generator.config
    assert (generator.hidden_size, generator.num_attention_heads, generator.intermediate_size) == {
        "small": (64, 1, 256),
        "base": (256, 4, 1024),
        "large": (256, 4, 1024),
    }[name]
