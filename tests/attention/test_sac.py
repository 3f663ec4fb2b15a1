"""Sparse adaptive connection: its attention, its edges, and the policy gradient that teaches it."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from hf_xformers import XFormerConfig, XFormerForReplacedTokenPreTraining
from hf_xformers.attention.sac import EdgePredictor, Edges
from hf_xformers.core.choices import ChoiceLoss, ChoiceSettings, rows_of_mean, token_rows
from hf_xformers.ops.chosen_keys import chosen_keys_attention, chosen_keys_reference
from hf_xformers.variants.sac import (
    XFSACConfig,
    XFSACForCausalLM,
    XFSACForMaskedLM,
    XFSACForSequenceClassification,
)
from tests.helpers import tokens

SMALL = {
    "vocab_size": 20,
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "max_position_embeddings": 32,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}


def config(**fields) -> XFSACConfig:
    layers = fields.pop("num_hidden_layers", 1)
    return XFSACConfig(
        **{**SMALL, "num_hidden_layers": layers}, attention={"type": "sac", "predictor_hidden": 4, **fields}
    )


def loud(model):
    """Parameters large enough that edges and their probabilities differ."""
    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "predictor" in name:
                parameter.normal_(0, 0.8)
    return model.double()


def walk_probability(predictor: EdgePredictor, states: torch.Tensor, source: int, picks: list[int], seen: set[int]):
    """log p of one source's picks, one step at a time, by the LSTM's equations written out."""
    cell, width = predictor.cell, predictor.spec.predictor_hidden
    vectors = [predictor.embed.weight @ x + predictor.embed.bias for x in states]

    def read(x, h, c):
        gates = cell.weight_ih @ x + cell.bias_ih + cell.weight_hh @ h + cell.bias_hh
        i, f, g, o = gates.split(width)
        c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
        return torch.sigmoid(o) * torch.tanh(c), c

    h, c = read(vectors[source], predictor.start[0], torch.zeros(width, dtype=torch.float64))
    total, left = torch.zeros((), dtype=torch.float64), set(seen) - {source}
    for pick in picks:
        scores = {}
        for j in left:
            far = max(-predictor.spec.edge_distances, min(predictor.spec.edge_distances, j - source))
            beside = predictor.distance[far + predictor.spec.edge_distances]
            scores[j] = (predictor.score.weight @ h) @ vectors[j] / math.sqrt(width) + beside
        total = total + scores[pick] - torch.stack(list(scores.values())).exp().sum().log()
        left.remove(pick)
        h, c = read(vectors[pick], h, c)
    return total


def force(monkeypatch, picks: torch.Tensor) -> None:
    """The next steps choose these, [B, G, T, n]."""
    steps = itertools.cycle(picks.unbind(-1))
    monkeypatch.setattr(EdgePredictor, "_pick", lambda self, scores, left: next(steps))


def test_lists_equal_masked_attention_with_gradients():
    torch.manual_seed(0)
    shape = (2, 3, 6, 4)
    query, key, value = (torch.randn(shape, dtype=torch.float64, requires_grad=True) for _ in range(3))
    index = torch.stack([torch.randperm(6)[:3] for _ in range(36)]).view(2, 3, 6, 3)
    there = torch.rand(index.shape) < 0.7
    there[0, 0, 0] = False
    found = chosen_keys_attention(query, key, value, index, there, 0.5)
    wanted, _ = chosen_keys_reference(query, key, value, index, there, 0.5)
    torch.testing.assert_close(found, wanted)
    assert found[0, 0, 0].eq(0).all()
    upstream = torch.randn_like(found)
    for one, other in zip(
        torch.autograd.grad(found, (query, key, value), upstream),
        torch.autograd.grad(wanted, (query, key, value), upstream),
    ):
        torch.testing.assert_close(one, other)


def test_long_lists_in_bfloat16():
    """What hundreds of small weights read is summed in float32: a sum in bfloat16 would stop growing."""
    torch.manual_seed(0)
    query, key, value = torch.rand(3, 1, 1, 500, 4).bfloat16()
    index, there = torch.rand(1, 1, 500, 500).topk(400).indices, torch.ones(1, 1, 500, 400, dtype=torch.bool)
    wanted, _ = chosen_keys_reference(query.double(), key.double(), value.double(), index, there, 0.5)
    found = chosen_keys_attention(query, key, value, index, there, 0.5)
    torch.testing.assert_close(found.double(), wanted, rtol=2**-8, atol=0.0)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [None, 2])
def test_log_probability_equals_a_loop(causal, window):
    torch.manual_seed(0)
    kind = XFSACForCausalLM if causal else XFSACForMaskedLM
    model = loud(kind(config(edges_per_node=2, edge_distances=2, candidate_window=window))).train()
    ids, mask = torch.randint(1, 20, (2, 6)), torch.ones(2, 6, dtype=torch.long)
    mask[1, :2] = 0
    layer = model.model.trunk.layers[0].attention
    seen = {}
    layer.register_forward_hook(
        lambda module, args, kwargs, output: seen.update(x=args[0], context=args[1]), with_kwargs=True
    )
    found = model.model(ids, attention_mask=mask).log_probs
    picks = seen["context"].prepared(Edges).picks
    for row in range(2):
        total = torch.zeros((), dtype=torch.float64)
        for i in range(6):
            if mask[row, i]:
                near = {j for j in range(6) if window is None or abs(i - j) <= window}
                visible = {j for j in near if mask[row, j] and not (causal and j > i)}
                chosen = [j for j in picks[row, 0, i].tolist() if j >= 0]
                assert len(chosen) == min(2, len(visible - {i})) and set(chosen) <= visible - {i}
                total = total + walk_probability(layer.predictor, seen["x"][row], i, chosen, visible)
        torch.testing.assert_close(found[row], total)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [None, 2])
def test_walks_taken_again_have_the_gradient_of_noted_ones(monkeypatch, causal, window):
    """In blocks of two sources, with padding and weights of their own for rows."""
    monkeypatch.setattr("hf_xformers.attention.sac.rows_at_once", lambda scores: 2)
    kind = XFSACForCausalLM if causal else XFSACForMaskedLM
    ids, mask = torch.randint(1, 20, (2, 7)), torch.ones(2, 7, dtype=torch.long)
    mask[1, :3] = 0
    found = []
    for implementation in ("sdpa", "eager"):
        torch.manual_seed(0)
        model = loud(kind(config(edges_per_node=3, candidate_window=window, share_structure="none"))).train()
        model.set_attn_implementation(implementation)
        torch.manual_seed(2)
        log_probs = model.model(ids, attention_mask=mask).log_probs
        predictor = model.model.trunk.layers[0].attention.predictor
        upstream = torch.tensor([1.0, -0.3], dtype=torch.float64)
        found.append((log_probs, *torch.autograd.grad(log_probs, list(predictor.parameters()), upstream)))
    for one, other in zip(*found):
        assert other.abs().sum() > 0
        torch.testing.assert_close(one, other)


def test_policy_gradient_is_that_of_the_expected_loss(monkeypatch):
    """Over all edge sets of a toy of three tokens with one edge each, weighted by their probabilities, the gradients
    that training gives are those of the expected loss; a baseline changes none of it."""
    torch.manual_seed(0)
    model = loud(XFSACForMaskedLM(config(edges_per_node=1))).train()
    layer, ids = model.model.trunk.layers[0].attention, torch.randint(1, 20, (2, 3))
    labels = torch.tensor([[3, -100, 5], [7, 2, -100]])
    parameters = list(layer.predictor.parameters())
    seen = {}
    layer.register_forward_hook(lambda module, args, output: seen.update(x=args[0].detach()))
    others = [[j for j in range(3) if j != i] for i in range(3)]
    sets = list(itertools.product(*others))
    losses = []
    for edges in sets:  # both rows with the same edges, though each draws its own
        force(monkeypatch, torch.tensor(edges).view(1, 1, 3, 1).expand(2, -1, -1, -1))
        logits = model(ids).logits.detach()
        each = [torch.nn.functional.cross_entropy(x, y, reduction="sum") / 4 for x, y in zip(logits, labels)]
        losses.append(torch.stack(each))
    states = seen["x"]
    logs = [
        [sum(walk_probability(layer.predictor, states[row], i, [e[i]], {0, 1, 2}) for i in range(3)) for e in sets]
        for row in range(2)
    ]
    expected = sum(logs[row][n].exp() * losses[n][row] for row in range(2) for n in range(len(sets)))
    wanted = torch.autograd.grad(expected, parameters, allow_unused=True)
    found = [torch.zeros_like(p) for p in parameters]
    for first, second in itertools.product(range(len(sets)), repeat=2):
        force(monkeypatch, torch.tensor([sets[first], sets[second]]).view(2, 1, 3, 1))
        model.model.choice_loss.mean.fill_(1.7)
        model.model.choice_loss.passes.fill_(1)
        loss = model(ids, labels=labels).loss
        torch.testing.assert_close(loss.detach(), losses[first][0] + losses[second][1])
        chance = (logs[0][first] + logs[1][second]).exp().detach()
        for total, gradient in zip(found, torch.autograd.grad(loss, parameters)):
            total += chance * gradient
    for one, other in zip(found, wanted):
        torch.testing.assert_close(one, torch.zeros_like(one) if other is None else other, atol=1e-9, rtol=1e-7)


def test_edges_are_drawn_by_their_probabilities():
    torch.manual_seed(0)
    model = loud(XFSACForMaskedLM(config(edges_per_node=2))).train()
    layer = model.model.trunk.layers[0].attention
    seen, count = {}, 4000
    layer.register_forward_hook(lambda module, args, output: seen.update(x=args[0], context=args[1]))
    with torch.no_grad():
        model.model(torch.tensor([[3, 7, 9, 4]]).expand(count, -1))
    picks = seen["context"].prepared(Edges).picks[:, 0, 1]
    for pair in itertools.permutations([0, 2, 3], 2):
        chance = walk_probability(layer.predictor, seen["x"][0], 1, list(pair), {0, 1, 2, 3}).exp().item()
        share = (picks == torch.tensor(pair)).all(-1).double().mean().item()
        assert abs(share - chance) < 4 * math.sqrt(chance * (1 - chance) / count)


def test_the_baseline_moves_once_per_pass_and_is_saved(tmp_path):
    torch.manual_seed(0)
    model = XFSACForCausalLM(config(edges_per_node=2, num_hidden_layers=2)).train()
    ids, baseline = torch.randint(1, 20, (3, 8)), model.model.choice_loss
    first = model(ids, labels=ids).loss
    assert baseline.passes == 1
    torch.testing.assert_close(baseline.mean, first.detach())
    model.gradient_checkpointing_enable()
    second = model(ids, labels=ids).loss
    second.backward()
    assert baseline.passes == 2
    torch.testing.assert_close(baseline.mean, 0.9 * first.detach() + 0.1 * second.detach())
    model.eval()(ids, labels=ids)
    with torch.no_grad():
        model.train()(ids, labels=ids)
    assert baseline.passes == 2
    model.save_pretrained(tmp_path)
    again = XFSACForCausalLM.from_pretrained(tmp_path).model.choice_loss
    assert torch.equal(again.mean, baseline.mean) and torch.equal(again.passes, baseline.passes)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_draws_the_same_edges(reentrant):
    def gradients(checkpointed: bool):
        torch.manual_seed(0)
        model = XFSACForMaskedLM(config(edges_per_node=2, num_hidden_layers=2)).train()
        if checkpointed:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        ids = torch.randint(1, 20, (3, 8))
        for _ in range(2):
            model.zero_grad()
            model(ids, labels=ids).loss.backward()
        return [p.grad for p in model.parameters()]

    for one, other in zip(gradients(False), gradients(True)):
        torch.testing.assert_close(one, other)


def test_losses_of_rows_add_up_to_the_loss():
    torch.manual_seed(0)
    model = XFSACForSequenceClassification(config()).eval()
    ids, labels = torch.randint(1, 20, (3, 6)), torch.tensor([0, 1, 1])
    output = model(ids, labels=labels)

    def loss_of(label, logits):
        return torch.nn.functional.cross_entropy(logits, label)

    rows = rows_of_mean(loss_of, output.logits, labels)
    torch.testing.assert_close(rows.losses.sum(), output.loss)
    logits, targets = torch.randn(2, 5, 7), torch.tensor([[1, 2, -100, 4, 5], [3, -100, -100, -100, 6]])
    rows = token_rows(logits, targets, 12, shifted=True)
    wanted = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), targets[:, 1:].flatten(), reduction="sum")
    torch.testing.assert_close(rows.losses.sum(), wanted / 12)
    torch.testing.assert_close(rows.shares, torch.tensor([3 / 12, 1 / 12]))


def test_a_head_without_losses_of_rows_weighs_all_choices_by_the_whole():
    loss = ChoiceLoss(ChoiceSettings(0.5))
    log_probs = torch.tensor([-1.0, -2.0], requires_grad=True)
    assert loss(log_probs, torch.tensor(3.0), None).item() == 0.0  # the first pass has nothing to compare with
    loss(log_probs, torch.tensor(4.0), None).backward()
    assert log_probs.grad.tolist() == [1.0, 1.0]
    assert loss.mean == 3.5


def test_choices_of_a_generator_learn():
    fields = {
        "attention": {"type": "sac", "predictor_hidden": 4},
        "pretraining": {"replaced_tokens": {"generator_size": 1.0}},
    }
    model = loud(XFormerForReplacedTokenPreTraining(XFormerConfig(**{**SMALL, "vocab_size": 50}, **fields))).train()
    ids = tokens(2, 12, high=50)
    for _ in range(2):  # the first pass has nothing to compare with
        model.zero_grad()
        model(ids.where(torch.rand(ids.shape) < 0.7, 5), labels=ids).loss.backward()
    for part in (model, model.generator):
        predictor = part.model.trunk.layers[0].attention.predictor
        assert sum(float(parameter.grad.abs().sum()) for parameter in predictor.parameters()) > 0


def test_of_equal_words_the_first_is_connected():
    """A word at several places has one score, which a step of generation and a pass over the whole text round
    otherwise."""
    predictor = loud(XFSACForCausalLM(config())).eval().model.trunk.layers[0].attention.predictor
    for best in (2e-4, 1.0, -30.0):
        scores = torch.full((1, 1, 2, 5), best, dtype=torch.float64)
        scores[..., 0] -= 1e-9
        scores[:, :, 0, 3] *= 1 + 4e-16  # rounded up
        scores[:, :, 0, 2] *= 1 - 4e-16
        picks = predictor._pick(scores, torch.zeros_like(scores, dtype=torch.bool))
        assert picks.tolist() == [[[1, 1]]]


def test_two_baselines_are_refused():
    layers = {1: {"attention": {"type": "sac", "reward_baseline_decay": 0.5}}}
    with pytest.raises(ValueError, match="share one baseline"):
        XFSACForMaskedLM(XFSACConfig(**{**SMALL, "num_hidden_layers": 2}, per_layer_config=layers))
