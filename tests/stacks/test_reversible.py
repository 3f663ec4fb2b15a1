"""Reversible layers: the equation, and a backward pass that keeps nothing."""

from __future__ import annotations

import copy

import pytest
import torch

from hf_xformers import (
    XFormerConfig,
    XFormerForCausalLM,
    XFormerForMaskedLM,
    XFormerForQuestionAnswering,
    XFormerForSeq2SeqLM,
    XFormerForSequenceClassification,
    XFormerForTokenClassification,
)
from hf_xformers.stacks.driver import Pass
from hf_xformers.stacks.reversible import ReversibleStack, _Run

SIZES = {
    "vocab_size": 40,
    "hidden_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "max_position_embeddings": 64,
    "residual": "pre_ln",
    "stack": "reversible",
    "initializer_range": 0.2,
}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
REFORMER = {"attention": {"type": "reformer", "chunk_length": 4, "num_hashes": 2}, "position": "sinusoidal_absolute"}
MIXES = {
    "dense": {},
    "dropout": {"hidden_dropout_prob": 0.2, "attention_probs_dropout_prob": 0.2, "activation_dropout_prob": 0.2},
    "reformer": REFORMER,
    "losses": {
        "attention": {"type": "routing_transformer", "window_size": 4, "num_clusters": 3, "commitment_weight": 0.5}
    },
    "score_bias": {"position": "t5_relative_bias"},
    "macaron": {"block": "macaron"},
    "rezero": {"residual": {"type": "rezero", "init": 0.7}},
    "chunked": {"chunk_size_feed_forward": 4},
    "differing": {"per_layer_config": {1: {"feedforward": "swiglu"}}},
}


def build(head=XFormerForMaskedLM, seed=0, **fields):
    torch.manual_seed(seed)
    return head(XFormerConfig(**{**SIZES, **NO_DROPOUT, **fields})).double()


def batch(length=13):
    ids = torch.randint(5, 40, (2, length), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[1, length - 4 :] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids}


def gradients(net, seed=4, **given):
    torch.manual_seed(seed)
    loss = net(**given).loss
    after_forward = torch.get_rng_state()
    loss.backward()
    assert torch.equal(torch.get_rng_state(), after_forward)  # replaying leaves the generator alone
    return loss.detach(), {name: parameter.grad for name, parameter in net.named_parameters()}


def plain_twin(net):
    """The same model whose stacks keep all activations."""
    twin = copy.deepcopy(net)
    for module in twin.modules():
        if isinstance(module, ReversibleStack):
            module._rebuilds = lambda *given: False
    return twin


def test_equation():
    """y1 = x1 + f(x2), y2 = x2 + g(y1), by hand; the result is the mean of both streams."""
    net = build().eval()
    tower, ids = net.model.trunk, batch()["input_ids"]
    first = second = tower.embedding.tokens(ids) + tower.position.table.weight[:13]
    for layer in tower.layers:
        a, f = layer.attention, layer.feedforward
        x = layer.attention_residual.norm(second)
        q, k, v = (p(x).view(2, 13, 2, 8).transpose(1, 2) for p in (a.q_proj, a.k_proj, a.v_proj))
        first = first + a.o_proj((torch.softmax(q @ k.mT / 8**0.5, -1) @ v).transpose(1, 2).reshape(2, 13, 16))
        x = layer.feedforward_residual.norm(first)
        second = second + f.down_proj(torch.nn.functional.gelu(f.up_proj(x)))
    expected = tower.final_norm((first + second) / 2)
    for grad in (True, False):
        with torch.set_grad_enabled(grad):
            torch.testing.assert_close(net.model(ids).last_hidden_state, expected, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize(
    ("head", "name"),
    [
        *((XFormerForMaskedLM, name) for name in MIXES),
        *((XFormerForCausalLM, name) for name in ("dropout", "reformer", "score_bias")),
        *((XFormerForSeq2SeqLM, name) for name in ("dropout", "losses", "macaron")),
    ],
)
def test_gradients_equal_autograd(head, name):
    """Rebuilt activations give the gradients of kept ones, with dropout, losses, streams and a memory."""
    net = build(head, **MIXES[name]).train()
    loss, found = gradients(net, **batch())
    expected_loss, expected = gradients(plain_twin(build(head, **MIXES[name]).train()), **batch())
    torch.testing.assert_close(loss, expected_loss, rtol=1e-12, atol=1e-12)
    for key, gradient in expected.items():
        torch.testing.assert_close(found[key], gradient, rtol=1e-8, atol=1e-10, msg=key)


def test_a_second_backward_pass_draws_the_same_numbers():
    net = build(**MIXES["dropout"]).train()
    loss = net(**batch()).loss
    first, second = (torch.autograd.grad(loss, list(net.parameters()), retain_graph=True) for _ in range(2))
    for one, other in zip(first, second, strict=True):
        torch.testing.assert_close(one, other)


class States(torch.nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, ids):
        return self.model(ids).last_hidden_state


def test_a_traced_graph_is_saved(tmp_path):
    net, ids = States(build().eval().model), batch()["input_ids"]
    torch.jit.save(torch.jit.trace(net, (ids,), check_trace=False), tmp_path / "graph.pt")
    torch.testing.assert_close(torch.jit.load(tmp_path / "graph.pt")(ids.flip(1)), net(ids.flip(1)))


def test_gradient_of_the_embedding_and_of_frozen_models():
    net = build().train()
    ids = batch()["input_ids"]
    for frozen in (False, True):
        for parameter in net.parameters():
            parameter.requires_grad_(not frozen)
        slopes = []
        for model in (net, plain_twin(net)):
            vectors = net.get_input_embeddings()(ids).detach().requires_grad_()
            slopes.append(torch.autograd.grad(model(inputs_embeds=vectors, labels=ids).loss, vectors)[0])
        torch.testing.assert_close(*slopes, rtol=1e-9, atol=1e-12)


def kept_bytes(net, given):
    """Bytes that autograd keeps for the backward pass, parameters aside."""
    own = {parameter.untyped_storage().data_ptr() for parameter in net.parameters()}
    kept = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.size()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = net(**given).loss
    loss.backward()
    return sum(kept.values())


@pytest.mark.parametrize("fields", [{}, REFORMER], ids=["dense", "reformer"])
def test_what_is_kept_does_not_grow_with_depth(fields):
    given = batch()
    few, many = (kept_bytes(build(num_hidden_layers=count, **fields).train(), given) for count in (2, 8))
    assert many == few
    twins = [plain_twin(build(num_hidden_layers=count, **fields).train()) for count in (2, 8)]
    few, many = (kept_bytes(twin, given) for twin in twins)
    assert many > 2.5 * few


def test_checkpointing_recording_and_caching_take_the_plain_way():
    net, given = build(XFormerForCausalLM, **REFORMER).train(), batch()
    expected = gradients(plain_twin(net), **given)[1]
    for use_reentrant in (True, False):
        twin = copy.deepcopy(net)
        twin.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": use_reentrant})
        for key, gradient in gradients(twin, **given)[1].items():
            torch.testing.assert_close(gradient, expected[key], rtol=1e-9, atol=1e-12, msg=key)
    net.eval()
    for wish in ("output_hidden_states", "output_attentions"):
        out = net(given["input_ids"], **{wish: True})
        recorded = out.hidden_states if wish == "output_hidden_states" else out.attentions
        assert recorded[1].requires_grad
        torch.testing.assert_close(out.logits, net(given["input_ids"]).logits)
    assert net(given["input_ids"], use_cache=True).past_key_values.get_seq_length() == 13
    net.train()
    assert net(given["input_ids"], use_cache=True).past_key_values.get_seq_length() == 0  # rebuilt: nothing is written


def test_under_autocast():
    """Layers run again in the precision of the first time; the streams stay in float32, so little is lost."""
    net, given = build(**REFORMER).float().train(), batch()
    results = []
    for model in (net, plain_twin(net)):
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(**given).loss
        loss.backward()
        results.append({name: parameter.grad for name, parameter in model.named_parameters()})
    for key, gradient in results[1].items():
        assert (results[0][key] - gradient).norm() <= 0.05 * gradient.norm() + 1e-6, key


def test_refusals():

    class Layered(type(XFormerConfig(**SIZES).position)):
        acts = frozenset({"layer_input"})

    with pytest.raises(ValueError, match="every layer"):
        XFormerConfig(**{**SIZES, "position": Layered()})


# ------------------------------------------------------------------------------------------- both streams at the end


def side_by_side(made=XFormerForMaskedLM, **fields):
    torch.manual_seed(0)
    fields = {**SIZES, **NO_DROPOUT, "tie_word_embeddings": False, "head": "linear", **fields}
    return made(XFormerConfig(**{**fields, "stack": {"type": "reversible", "output": "concatenation"}})).double()


def inputs_alone():
    given = batch()
    return {name: given[name] for name in ("input_ids", "attention_mask")}


def test_concatenation():
    """Both streams of a stack whose mean is known, and the same gradients as with kept activations."""
    net, given = side_by_side().eval(), inputs_alone()
    hidden = torch.randn(2, 13, 16, dtype=torch.float64)
    context = net.model.trunk.make_context(hidden)
    trunk = net.model.trunk
    found = trunk.stack(Pass(trunk.layers, hidden, context, trunk.position)).hidden_states
    first, second, _ = _Run(trunk.layers, context, None, trunk.position).forward(hidden, hidden, None, {})
    torch.testing.assert_close(found, torch.cat([first, second], dim=-1))
    assert trunk.final_norm.weight.shape == (32,) and net.lm_head.decoder.weight.shape == (40, 32)
    slopes = []
    for keeps in (False, True):
        net.zero_grad()
        net(**given, output_hidden_states=keeps).logits.square().sum().backward()
        slopes.append({name: x.grad.clone() for name, x in net.named_parameters() if x.grad is not None})
    assert slopes[0].keys() == slopes[1].keys()
    for name, slope in slopes[0].items():
        torch.testing.assert_close(slope, slopes[1][name], rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("head", ["transform", "factorized"])
def test_concatenation_under_tied_heads(head):
    net, given = side_by_side(head=head, tie_word_embeddings=True), inputs_alone()
    assert net(**given).logits.shape == (2, 13, 40)
    assert net.lm_head.dense.weight.shape == (16, 32)


@pytest.mark.parametrize("pooler", [True, False])
def test_concatenation_under_classifiers(pooler):
    given = inputs_alone()
    for made in (XFormerForSequenceClassification, XFormerForTokenClassification, XFormerForQuestionAnswering):
        net = side_by_side(made, add_pooler=pooler)
        pooled = made is XFormerForSequenceClassification and pooler
        assert net.classifier.in_features == (16 if pooled else 32)
        assert all(x.isfinite().all() for x in net(**given).values())
