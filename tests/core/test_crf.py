"""The linear chain over tags against all sequences, one by one."""

import itertools

import pytest
import torch

from hf_xformers import XFormerConfig
from hf_xformers.modeling.crf import LinearChainCRF, allowed_steps
from hf_xformers.variants import family
from tests.helpers import NO_DROPOUT, close, make_strong, tokens

BIO = ["O", "B-A", "I-A", "I-B", "B-B"]
BIOES = ["O", "B-A", "I-A", "E-A", "S-A"]
PLAIN = ["noun", "verb", "other"]


def chain(names, seed=0):
    return make_strong(LinearChainCRF(names).double(), seed=seed, amount=1.0)


def score(crf, emissions, tags):
    total = crf.start[tags[0]] + crf.end[tags[-1]] + sum(emissions[t, tag] for t, tag in enumerate(tags))
    return total + sum(crf.steps[a, b] for a, b in itertools.pairwise(tags))


def well_formed(names, tags):
    """By reading a sequence from left to right."""
    whole, open_entity = any(name[0] in "ES" for name in names), None
    for name in (names[tag] for tag in tags):
        mark, kind = name[0], name[2:]
        if mark in "IE" and open_entity != kind:
            return False
        if mark not in "IE" and whole and open_entity is not None:
            return False
        open_entity = kind if mark in "BI" else None
    return not (whole and open_entity is not None)


@pytest.mark.parametrize("names", [BIO, BIOES, PLAIN])
def test_against_all_sequences(names):
    crf, generator = chain(names), torch.Generator().manual_seed(1)
    emissions = 2 * torch.randn(1, 4, len(names), generator=generator, dtype=torch.float64)
    everything = list(itertools.product(range(len(names)), repeat=4))
    scores = torch.stack([score(crf, emissions[0], tags) for tags in everything])
    real = torch.ones(1, 4, dtype=torch.bool)
    for tags in everything[:: len(everything) // 5]:
        loss = crf(emissions, torch.tensor([tags]), real)
        close(loss[0], torch.logsumexp(scores, 0) - score(crf, emissions[0], tags))
    kept = [n for n, tags in enumerate(everything) if names is PLAIN or well_formed(names, tags)]
    assert names is PLAIN or 0 < len(kept) < len(everything)
    best = max(kept, key=lambda n: scores[n])
    path, lost = crf.best(emissions, real)
    assert tuple(path[0].tolist()) == everything[best]
    for place, tag in itertools.product(range(4), range(len(names))):
        with_tag = [scores[n] for n in kept if everything[n][place] == tag]
        if with_tag:
            close(lost[0, place, tag], max(with_tag) - scores[best])
        else:
            assert lost[0, place, tag] < -5000


def test_weights_of_tags():
    """Training sees every sequence's score less the logarithms of its tags' weights; evaluation and best sequences
    know none. Of single tokens it is learnt what a weighted cross-entropy learns: shares times weights."""
    crf = chain(BIO)
    emissions, tags = torch.randn(1, 3, 5, dtype=torch.float64), torch.tensor([[0, 2, 1]])
    real, weights = torch.ones(1, 3, dtype=torch.bool), torch.tensor([0.2, 3.0, 5.0, 0.7, 1.0], dtype=torch.float64)
    plain, best = crf(emissions, tags, real), crf.best(emissions, real)[1]
    crf.weigh(weights)
    everything = list(itertools.product(range(5), repeat=3))
    likely = torch.stack([score(crf, emissions[0], one).exp() / weights[list(one)].prod() for one in everything])
    close(crf(emissions, tags, real)[0], -(likely[everything.index((0, 2, 1))] / likely.sum()).log())
    close(crf.best(emissions, real)[1], best)
    close(crf.eval()(emissions, tags, real), plain)
    assert "log_weights" not in crf.state_dict()

    crf = LinearChainCRF(BIO).double()
    crf.weigh(weights)
    counts = torch.tensor([40, 3, 2, 1, 4])
    learnt = (counts * weights).log().requires_grad_()
    labels = torch.arange(5).repeat_interleave(counts)[:, None]
    crf(learnt.expand(50, 1, 5), labels, torch.ones(50, 1, dtype=torch.bool)).sum().backward()
    close(learnt.grad, torch.zeros(5, dtype=torch.float64))


def test_gaps_and_padding_change_nothing():
    """The chain runs over the tokens that have a tag, wherever they stand; a row without any has no loss."""
    crf = chain(BIO)
    emissions = torch.randn(3, 7, 5, dtype=torch.float64, requires_grad=True)
    tags = torch.randint(0, 5, (3, 7))
    mask = torch.tensor([[0, 1, 0, 0, 1, 1, 0], [1] * 7, [0] * 7]).bool()
    loss, (path, lost) = crf(emissions, tags, mask), crf.best(emissions, mask)
    assert loss[2] == 0
    gradient = torch.autograd.grad(loss.sum(), emissions)[0]
    assert gradient.isfinite().all() and not gradient[~mask].any()
    for row in range(2):
        alone, real = emissions[row][mask[row]][None], torch.ones(1, int(mask[row].sum()), dtype=torch.bool)
        close(crf(alone, tags[row][mask[row]][None], real)[0], loss[row])
        own, own_lost = crf.best(alone, real)
        assert path[row][mask[row]].equal(own[0])
        close(lost[row][mask[row]], own_lost[0])
    assert not path[~mask].any()


def test_schemes():
    start, step, end = allowed_steps(BIO)
    assert start == [True, True, False, False, True] and all(end)
    assert step[1] == [True, True, True, False, True]
    assert allowed_steps(["LABEL_0", "LABEL_1"]) is None and allowed_steps(["O"]) is None
    assert not allowed_steps(BIOES)[2][1]  # an entity that began has to end


@pytest.mark.parametrize("variant", ["bert", "tener", "linear_transformer"])
def test_as_the_head_of_any_encoder(variant):
    """Logits say the best sequence; padding, gaps and special tokens do not move it."""
    config = family(variant)["ForTokenClassification"].config_class(
        **{"vocab_size": 60, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2},
        **{"intermediate_size": 8, "bos_token_id": 2, "eos_token_id": 3, "tag_decoder": "crf", **NO_DROPOUT},
        id2label=dict(enumerate(BIO)),
    )
    torch.manual_seed(0)
    model = make_strong(family(variant)["ForTokenClassification"](config).double().eval(), amount=0.5)
    words = tokens(1, 6, high=60)
    ids = torch.cat([torch.tensor([[2]]), words, torch.tensor([[3, 0, 0]])], 1)
    mask = (ids != 0).long()
    labels = torch.tensor([[-100, 0, 1, 2, 0, -100, 4, -100, -100, -100]])
    with torch.no_grad():
        logits = model(ids, attention_mask=mask).logits
        tags = [BIO[tag] for tag in logits[0, 1:7].argmax(-1)]
        assert well_formed(BIO, [BIO.index(tag) for tag in tags])
        tag_mask = torch.tensor([[0, 1, 1, 1, 1, 1, 1, 0, 0, 0]])
        close(model(ids, attention_mask=mask, tag_mask=tag_mask).logits[:, 1:7], logits[:, 1:7])
        model.train()
        single = model(ids, attention_mask=mask).logits
        output = model(ids, attention_mask=mask, labels=labels)
    known = labels != -100
    close(output.loss, model.crf(single, labels, known).sum() / 5)
    with pytest.raises(ValueError, match="tag_mask"):
        model(ids, tag_mask=tag_mask[:, :3])
    assert XFormerConfig().tag_decoder == "softmax"
