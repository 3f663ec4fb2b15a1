"""The adaptive embedding and the adaptive softmax: their formulas, tying, and refusals."""

import pytest
import torch
from torch import nn

from hf_xformers import XFormerConfig, XFormerForCausalLM, XFormerModel
from tests.helpers import close, make_strong, tokens

SIZES = dict(vocab_size=40, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16)
CLUSTERS = {"cutoffs": [10, 18, 30], "factor": 2, "width": 12}  # widths 12, 6, 3, 1
BOUNDS = [0, 10, 18, 30, 40]
BOTH = {"embedding": {"type": "adaptive", **CLUSTERS}, "head": {"type": "adaptive", "bias": True, **CLUSTERS}}


def model(kind=XFormerForCausalLM, **fields):
    torch.manual_seed(0)
    return make_strong(kind(XFormerConfig(**{**SIZES, **BOTH, **fields})).double().eval())


@torch.no_grad()
@pytest.mark.parametrize("scale", [True, False])
def test_embedding_by_the_formula(scale):
    net = model(XFormerModel, embedding={"type": "adaptive", "scale": scale, **CLUSTERS}, position="none")
    part, seen = net.trunk.embedding, []
    part.register_forward_hook(lambda _, __, output: seen.append(output))
    ids = torch.arange(40).view(4, 10).flip(0)
    net(input_ids=ids)
    assert [list(table.weight.shape) for table in part.tokens.tables] == [[10, 12], [8, 6], [12, 3], [10, 1]]
    for row in range(4):
        for place in range(10):
            word = int(ids[row, place])
            cluster = max(index for index in range(4) if BOUNDS[index] <= word)
            narrow = part.tokens.tables[cluster].weight[word - BOUNDS[cluster]]
            expected = part.tokens.projections[cluster].weight @ narrow * (4.0 if scale else 1.0)
            close(seen[0][row, place], expected)
    vectors = net.get_input_embeddings()(ids)
    close(net(inputs_embeds=vectors).last_hidden_state, net(input_ids=ids).last_hidden_state)


@torch.no_grad()
def test_head_equals_torch():
    """nn.AdaptiveLogSoftmaxWithLoss has no projection before the first cluster, and no biases behind it."""
    head = {"type": "adaptive", "cutoffs": [10, 18, 30], "factor": 2, "bias": True}
    net = model(embedding="token", head=head, tie_word_embeddings=False, hidden_size=16)
    part, theirs = net.lm_head, nn.AdaptiveLogSoftmaxWithLoss(16, 40, [10, 18, 30], 2.0, head_bias=True).double()
    part.projections[0].weight.copy_(torch.eye(16))
    theirs.head.weight.copy_(torch.cat([part.tables[0].weight, part.cluster.weight]))
    theirs.head.bias.copy_(torch.cat([part.tables[0].bias, part.cluster.bias]))
    for index, tail in enumerate(theirs.tail, start=1):
        tail[0].weight.copy_(part.projections[index].weight.T)
        tail[1].weight.copy_(part.tables[index].weight)
        part.tables[index].bias.zero_()
    states = torch.randn(7, 16, dtype=torch.float64)
    close(part(states), theirs.log_prob(states))
    close(part(states).exp().sum(-1), torch.ones(7).double())


def test_losses_and_gradients_of_tied_tables():
    """The model's loss is the mean of -log p(next word), written out; a tied table learns from both sides."""
    net, ids = model(), torch.arange(40).view(4, 10).flip(1)
    loss, states = net(input_ids=ids, labels=ids).loss, net.model(input_ids=ids).last_hidden_state
    part, table = net.lm_head, net.model.trunk.embedding.tokens
    assert all(own.weight is other.weight for own, other in zip(part.tables, table.tables, strict=True))
    assert all(own.weight is other.weight for own, other in zip(part.projections, table.projections, strict=True))
    losses = []
    for row in range(4):
        for place in range(9):
            word, state = int(ids[row, place + 1]), states[row, place]
            cluster = max(index for index in range(4) if BOUNDS[index] <= word)
            narrow = part.projections[0].weight.T @ state
            scores = [*(table.tables[0].weight @ narrow + part.tables[0].bias), *part.cluster(narrow)]
            chances = torch.stack(scores).softmax(0)
            if cluster == 0:
                losses.append(-chances[word].log())
                continue
            narrow = table.projections[cluster].weight.T @ state
            inner = (table.tables[cluster].weight @ narrow + part.tables[cluster].bias).softmax(0)
            losses.append(-(chances[10 + cluster - 1] * inner[word - BOUNDS[cluster]]).log())
    close(loss, torch.stack(losses).mean())
    loss.backward()
    assert all(parameter.grad is not None for parameter in net.parameters())
    assert all(bool(entry.weight.grad.any()) for entry in table.tables)


@pytest.mark.parametrize("how", ["all", "after_first", "none"])
def test_tied_projections(how):
    net = model(head={"type": "adaptive", "tied_projections": how, **CLUSTERS})
    pairs = zip(net.lm_head.projections, net.get_input_embeddings().projections, strict=True)
    expected = {"all": [True] * 4, "after_first": [False, True, True, True], "none": [False] * 4}[how]
    assert [own.weight is other.weight for own, other in pairs] == expected


def test_cutoffs_behind_the_end_divide_nothing():
    net = model(**{slot: {"type": "adaptive", "cutoffs": [10, 40, 90], "factor": 2} for slot in BOTH})
    assert [table.num_embeddings for table in net.get_input_embeddings().tables] == [10, 30]
    single = model(embedding="adaptive", head="adaptive")
    assert single.lm_head.cluster is None
    chances = single(input_ids=tokens(1, 3, high=40)).logits.exp().sum(-1)
    close(chances, torch.ones(1, 3).double())


def test_refusals():
    with pytest.raises(ValueError, match="of 40 cannot become one of 41"):
        model().resize_token_embeddings(41)
    with pytest.raises(ValueError, match="of 40 cannot become one of 41"):
        model(XFormerModel).resize_token_embeddings(41)
    with pytest.raises(ValueError, match="of 40 cannot become one of 48"):
        model().resize_token_embeddings(40, pad_to_multiple_of=16)
    assert len(model().resize_token_embeddings(40).tables) == 4
    for wrong in (-1, 40):
        with pytest.raises(IndexError):
            model()(torch.tensor([[3, wrong]]))
    untied = model(embedding="token", tie_word_embeddings=False)
    with pytest.raises(ValueError, match="predicts it in clusters"):
        untied.resize_token_embeddings(41)
