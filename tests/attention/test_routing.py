"""Routing attention: the update of its centroids, clusters by the length of a text, and any cache."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from transformers import DynamicCache, StaticCache

from hf_xformers import XFormerConfig, XFormerForCausalLM, XFormerForMaskedLM, XFormerModel
from hf_xformers.attention.shared import centroids
from tests.attention.group_helpers import (
    SIZES,
    build_layer,
    check_any_cache,
    check_numbers_of_each_row,
    check_numbers_of_each_stage,
    context,
    states,
)
from tests.helpers import make_strong, pad, tokens

SMALL = {"type": "routing_transformer", "num_clusters": 3, "window_size": 4, "block_size": 4}


def module(decoder=False, training=False, position="none", **fields):
    return build_layer({**SMALL, **fields}, decoder, position=position).train(training)


def projected(attention, x):
    """Normalised queries, normalised keys and values of the routed heads, [B, R, T, 8]."""
    normalized = lambda heads: F.layer_norm(heads, (8,))  # noqa: E731
    query = attention.heads(attention.q_proj(x))[:, attention.local :]
    value = attention.heads(attention.v_proj(x))[:, attention.local :]
    if attention.shared:
        return normalized(query), normalized(query), value
    return normalized(query), normalized(attention.heads(attention.k_proj(x))[:, attention.local :]), value


# ------------------------------------------------------------------------------------------- the equation


def test_heads_by_layer():
    config = XFormerConfig(**SIZES, attention={**SMALL, "first_routing_layer": 1, "num_routing_heads": 1})
    net = XFormerForMaskedLM(config)
    assert [layer.attention.routed for layer in net.model.trunk.layers] == [0, 1]
    assert not hasattr(net.model.trunk.layers[0].attention, "centroids")
    shared = XFormerForCausalLM(XFormerConfig(**SIZES, attention=SMALL))
    assert shared.model.trunk.layers[0].attention.k_proj.out_features == 8  # keys of the local head alone


# ------------------------------------------------------------------------------------------- learning


def test_centroids_follow_their_vectors():
    """Two training passes against a loop over vectors; padding and unused centroids take no part."""
    attention = module(training=True, num_routing_heads=2, ema_decay=0.9)
    attention.centroids[0, 2] = -50 * attention.centroids[0, :2].sum(0)  # far from everything
    mask = torch.ones(2, 9, dtype=torch.bool)
    mask[1, 4:] = False
    means, counts = attention.centroids.clone(), attention.counts.clone()
    for seed in (0, 1):
        x = states(9, seed=seed)
        q, k, _ = projected(attention, x)
        attention(x, context(9, False, mask))
        moved, weights = means * counts[..., None], counts.clone()
        for h in range(2):
            sums, numbers = torch.zeros(3, 8, dtype=torch.float64), [0, 0, 0]
            for vectors in (q, k):
                for b, t in mask.nonzero().tolist():
                    c = int((means[h] @ vectors[b, h, t]).argmax())
                    sums[c] += vectors[b, h, t]
                    numbers[c] += 1
            for c in range(3):
                moved[h, c] = 0.9 * moved[h, c] + 0.1 * sums[c]
                weights[h, c] = 0.9 * weights[h, c] + 0.1 * numbers[c]
        before, means, counts = means, moved / weights[..., None], weights
        torch.testing.assert_close(attention.centroids, means, rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(attention.counts, counts, rtol=1e-10, atol=1e-10)
        assert not torch.equal(before, means)


def test_a_forgotten_centroid_stays():
    attention = module(training=True, num_routing_heads=2, ema_decay=0.0)
    for seed in range(3):
        place = attention.centroids[0, :2].mean(0)  # between two others it is never the nearest
        attention.centroids[0, 2] = place
        attention(states(9, seed=seed), context(9))
        torch.testing.assert_close(attention.centroids[0, 2], place)
    assert attention.counts.min() > 0 and attention.centroids.isfinite().all()


def test_only_training_moves_centroids():
    attention, x = module(num_routing_heads=2), states(9)
    before = attention.centroids.clone()
    assert attention(x, context(9)).aux_losses is None
    assert torch.equal(attention.centroids, before)
    attention.train()
    attention.q_proj.weight.requires_grad_(False)  # frozen, as under adapters
    attention(x, context(9))
    assert torch.equal(attention.centroids, before)
    attention.q_proj.weight.requires_grad_(True)
    with torch.no_grad():  # a reference pass, or a text that is written for a reward
        attention.prepare(call := context(9), None)
        attention(x, call)
    assert torch.equal(attention.centroids, before)
    attention(x, context(9))
    assert not torch.equal(attention.centroids, before)


def test_all_processes_learn_the_same(monkeypatch):
    """Sums and counts are added over processes: two halves of a batch give what the whole gives in one."""
    x = states(9, batch=4)
    alone = module(training=True, num_routing_heads=2)
    alone(x, context(9))
    parts = []
    monkeypatch.setattr(centroids.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(centroids.dist, "all_reduce", lambda tensor: parts.append(tensor.clone()))
    for half in (x[:2], x[2:]):  # what each process would send
        module(training=True, num_routing_heads=2)(half, context(9))
    monkeypatch.setattr(centroids.dist, "all_reduce", lambda tensor: tensor.copy_(sum(parts)))
    for half in (x[:2], x[2:]):
        process = module(training=True, num_routing_heads=2)
        process(half, context(9))
        torch.testing.assert_close(process.centroids, alone.centroids)
        torch.testing.assert_close(process.counts, alone.counts)


@pytest.mark.parametrize("padded", [False, True])
def test_heads_are_routed_one_at_a_time(padded, monkeypatch):
    """Long texts have too many affinities for all heads at once: the same routes."""
    attention = module(num_routing_heads=2)
    x, mask = states(9), None
    if padded:
        mask = torch.ones(2, 9, dtype=torch.bool)
        mask[1, 5:] = False
    query, key, _ = projected(attention, x)
    together = attention.route(query, key, mask)
    monkeypatch.setattr(centroids, "_AFFINITIES_AT_ONCE", 1)
    apart = attention.route(query, key, mask)
    for one, other in ((together.query_labels, apart.query_labels), (together.key_labels, apart.key_labels)):
        assert torch.equal(one, other)
    for one, other in ((together.query_places, apart.query_places), (together.key_places, apart.key_places)):
        assert torch.equal(one[0], other[0])
        assert (one[1] is None and other[1] is None and not padded) or torch.equal(one[1], other[1])


@pytest.mark.parametrize("decoder", [False, True])
def test_commitment(decoder):
    attention = module(decoder, training=True, num_routing_heads=2, commitment_weight=0.5)
    x = states(9).requires_grad_()
    mask = torch.ones(2, 9, dtype=torch.bool)
    mask[1, 4:] = False
    centroids = attention.centroids.clone()
    loss = attention(x, context(9, decoder, mask)).aux_losses["routing_commitment"]
    q, k, _ = projected(attention, x)
    terms = []
    for vectors in (q,) if decoder else (q, k):
        nearest = torch.einsum("bhtd,hcd->bhtc", vectors, centroids).argmax(-1)
        chosen = torch.stack([torch.stack([centroids[h][nearest[b, h]] for h in range(2)]) for b in range(2)])
        terms.append((vectors - chosen).square().transpose(1, 2)[mask].mean())
    expected = 0.5 * torch.stack(terms).mean()
    torch.testing.assert_close(loss, expected, rtol=1e-10, atol=1e-12)
    for one, other in zip(torch.autograd.grad(loss, x), torch.autograd.grad(expected, x)):
        torch.testing.assert_close(one, other, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("decoder", [False, True])
def test_computed_again_with_the_same_decisions(decoder):
    """Checkpointing and reversible layers: one step of the centroids per pass, and the gradients of the plain pass."""
    heads = XFormerForCausalLM if decoder else XFormerForMaskedLM
    ids = torch.randint(5, 40, (2, 13), generator=torch.Generator().manual_seed(0))
    fields = {**SMALL, "ema_decay": 0.2, "commitment_weight": 0.3}  # centroids move far in one step
    for stack in ("plain", "reversible"):
        torch.manual_seed(0)
        start = heads(XFormerConfig(**SIZES, attention=fields, stack=stack)).double().train()
        results = []
        for how in ("plain", True, False):
            net = copy.deepcopy(start)
            if how == "plain":
                net.model.trunk.stack._rebuilds = lambda *given: False
            elif stack == "plain" or how:
                net.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": how})
            net(ids, labels=ids).loss.backward()
            found = {name: parameter.grad for name, parameter in net.named_parameters()}
            results.append((found, dict(net.named_buffers())))
        for found, buffers in results[1:]:
            for name, gradient in results[0][0].items():
                torch.testing.assert_close(found[name], gradient, rtol=1e-8, atol=1e-10, msg=name)
            for name, buffer in results[0][1].items():
                torch.testing.assert_close(buffers[name], buffer, rtol=1e-12, atol=1e-12, msg=name)


# ------------------------------------------------------------------------------------------- promises


def test_any_cache_gives_the_same():
    torch.manual_seed(0)
    net = XFormerForCausalLM(XFormerConfig(**SIZES, attention=SMALL, position="rotary")).double().eval()
    caches = None, DynamicCache(), StaticCache(config=net.config, max_cache_len=52)
    check_any_cache(net, torch.randint(5, 40, (2, 50)), (9, 1, 1, 20, 18, 1), caches)


# ------------------------------------------------------------------------------------------- clusters by length

DERIVED = {"num_clusters": None, "window_size": None, "num_routing_heads": 2}


def with_numbers(attention, clusters, width):
    """The layer with so many clusters and tokens in each, given in the config: the first centroids of the other's."""
    fields = {**DERIVED, "num_clusters": clusters, "window_size": width}
    found = module(attention.is_causal, **fields, share_qk=attention.shared)
    weights = dict(attention.state_dict())
    weights["centroids"], weights["counts"] = weights["centroids"][:, :clusters], weights["counts"][:, :clusters]
    found.load_state_dict(weights)
    return found


def test_as_many_clusters_as_the_text_needs():
    """k = sqrt(n) clusters of n / k tokens for each row, whatever it is padded to: as a config with these numbers."""
    attention = module(**DERIVED)
    assert attention.centroids.shape[1] == 8  # the root of 64
    lengths = (1, 1, 1), (2, 2, 1), (9, 3, 3), (11, 4, 3), (17, 5, 4), (40, 7, 6)
    check_numbers_of_each_row(attention, lambda *numbers: with_numbers(attention, *numbers), lengths)


def test_a_causal_text_takes_the_clusters_of_what_it_has_so_far(monkeypatch):
    monkeypatch.setattr(centroids, "_FIRST_STAGE", 4)
    attention = module(True, **DERIVED)
    assert [stage.begin for stage in attention.stages] == [0, 4, 16] and attention.stage_clusters == [2, 4, 8]
    layers = [with_numbers(attention, count, count) for count in (2, 4, 8)]
    check_numbers_of_each_stage(attention, layers, (0, 4, 16))


def test_centroids_out_of_use_do_not_move():
    """A text of 9 tokens has 3 clusters, so that what it teaches and what it commits to are those."""
    for decoder in (False, True):
        attention = module(decoder, training=True, **DERIVED)
        before = attention.centroids.clone()
        attention(states(9), context(9, decoder))
        used = 8 if decoder else 3  # a stage of its own begins at 64 tokens
        moved = (attention.centroids != before).any(-1).any(0)
        assert moved[:used].any() and not moved[used:].any()


def test_generation_passes_from_stage_to_stage(monkeypatch):
    monkeypatch.setattr(centroids, "_FIRST_STAGE", 4)
    torch.manual_seed(0)
    config = XFormerConfig(**SIZES, attention={**SMALL, **DERIVED}, position="rotary")
    net = XFormerForCausalLM(config).double().eval()
    check_any_cache(net, torch.randint(5, 40, (2, 30)), (3, 1, 1, 1, 18, 1, 5), [None])


@pytest.mark.parametrize("side", ["left", "right"])
def test_repeated_tokens_with_padding(side):
    """Tokens that are equal have affinities that differ in their last bits, by where they stand in a product; which of
    them a full cluster takes must not depend on that."""
    attention = {"type": "routing_transformer", "num_clusters": 3, "window_size": 9, "block_size": 4}
    sizes = dict(hidden_size=24, num_attention_heads=2, num_hidden_layers=2, intermediate_size=32, vocab_size=50)
    config = XFormerConfig(**sizes, attention=attention, position="none", max_position_embeddings=64)
    torch.manual_seed(0)
    model, wrong = make_strong(XFormerModel(config).eval(), amount=0.1), []
    for seed in range(60):
        ids = tokens(1, 50, seed=seed, low=5, high=7)
        padded, mask = pad([ids[0]], 51 + seed % 17, side)
        with torch.no_grad():
            expected = model(ids).last_hidden_state[0]
            found = model(padded, attention_mask=mask).last_hidden_state[0][mask[0].bool()]
        if (found - expected).abs().max() > 1e-3:
            wrong.append(seed)
    assert not wrong
