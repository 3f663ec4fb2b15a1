"""Tokens of a decoder that leave at different depths: against a computation layer by layer, and against caches."""

import pytest
import torch
from torch.nn.functional import cross_entropy

from hf_xformers.variants.depth_adaptive_transformer import (
    XFDepthAdaptiveTransformerConfig,
    XFDepthAdaptiveTransformerForCausalLM,
    XFDepthAdaptiveTransformerForSeq2SeqLM,
)
from tests.helpers import NO_DROPOUT, close, make_strong, pad, tokens

LAYERS = 4
SIZES = {
    **{"vocab_size": 99, "hidden_size": 16, "num_hidden_layers": LAYERS, "num_attention_heads": 2},
    **{"intermediate_size": 32, "pad_token_id": 0, "decoder_start_token_id": 1, "eos_token_id": None, **NO_DROPOUT},
}


def build(cls=XFDepthAdaptiveTransformerForCausalLM, residual="pre_ln", **stack):
    torch.manual_seed(0)
    config = XFDepthAdaptiveTransformerConfig(**SIZES, residual=residual, stack={"type": "decoder_exit", **stack})
    model = make_strong(cls(config).double().eval(), amount=0.2)
    for number, gate in enumerate(model.exits.gates):  # so that they differ from token to token
        torch.nn.init.normal_(gate.weight, std=1.0, generator=torch.Generator().manual_seed(number))
    return model


def by_hand(model, ids):
    """(logits [T, V], layers [T]) of one text [T]: every layer on all tokens, states of those that left put back."""
    trunk, exits, spec = model.model.trunk, model.exits, model.config.stack
    places = torch.arange(len(ids))[None]
    states = trunk.embedding(trunk.embedding.lookup(ids[None]), None, places, trunk.position)
    context = trunk.make_context(states)
    layers, logits = [0] * len(ids), torch.zeros(len(ids), 99).double()
    for number, layer in enumerate(trunk.layers, start=1):
        layer.prepare(context, None)
        new = layer(states, None, context=context, step=number - 1)[0]
        states = torch.stack([states[0, t] if at else new[0, t] for t, at in enumerate(layers)])[None]
        answers = model.lm_head(states if trunk.final_norm is None else trunk.final_norm(states))[0]
        for t in [t for t, at in enumerate(layers) if not at]:
            if number == LAYERS:
                leaves = True
            elif spec.halting == "gates":
                leaves = torch.sigmoid(exits.gates[number - 1](states[0, t])).item() > spec.threshold
            else:
                leaves = torch.softmax(answers[t], -1).max().item() > spec.threshold
            if leaves:
                layers[t], logits[t] = number, answers[t]
    return logits, layers


MODES = {"confidence": {"exit_threshold": 0.25}, "gates": {"halting": "gates", "exit_threshold": 0.7}}


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("residual", ["pre_ln", "post_ln"])
def test_exits_with_and_without_a_cache(mode, residual, side):
    model, rows = build(residual=residual, **MODES[mode]), [tokens(9, seed=s)[:n] for s, n in enumerate((9, 6, 4, 1))]
    with torch.no_grad():
        expected = [by_hand(model, row) for row in rows]
        assert len({layer for _, layers in expected for layer in layers}) >= 3
        ids, mask = pad(rows, 9, side, seed=5)
        whole = model(ids, attention_mask=mask, use_cache=False)
        recorded = model(ids, attention_mask=mask, use_cache=False, output_hidden_states=True)
        for chunks in ([1] * 9, [4, 1, 4], [9]):
            cache, found, layers, seen = None, [], [], 0
            for chunk in ids.split(chunks, 1):
                seen += chunk.shape[1]
                output = model(chunk, attention_mask=mask[:, :seen], past_key_values=cache, use_cache=True)
                cache = output.past_key_values
                found.append(output.logits)
                layers.append(output.exit_layers)
            for number, (logits, depths) in enumerate(expected):
                real = mask[number].bool()
                for output, exits in (
                    (torch.cat(found, 1), torch.cat(layers, 1)),
                    (whole.logits, whole.exit_layers),
                    (recorded.logits, recorded.exit_layers),
                ):
                    assert exits[number][real].tolist() == depths
                    close(output[number][real], logits)


@pytest.mark.parametrize("mode", MODES)
def test_translation(mode):
    """Teacher forcing, and generation with a cache, by beams, without: the same texts, from different depths."""
    model, ids = build(XFDepthAdaptiveTransformerForSeq2SeqLM, **MODES[mode]), tokens(3, 7)
    with torch.no_grad():
        for beams in (1, 2):
            texts = [
                model.generate(ids, max_new_tokens=8, num_beams=beams, do_sample=False, use_cache=cached)
                for cached in (True, False)
            ]
            assert torch.equal(*texts)
        text = tokens(3, 8, seed=2)
        whole = model(ids, decoder_input_ids=text)
        assert whole.exit_layers.unique().numel() > 1
        cache, found = None, []
        for one in text.split(1, 1):
            output = model(ids, decoder_input_ids=one, past_key_values=cache, use_cache=True)
            cache = output.past_key_values
            found.append(output)
    close(torch.cat([one.logits for one in found], 1), whole.logits)
    assert torch.equal(torch.cat([one.exit_layers for one in found], 1), whole.exit_layers)


def test_fewer_layers_run():
    """All tokens leave after the first layer: of the others the keys and values alone are made, for a cache."""
    model, ids = build(exit_threshold=0), tokens(2, 5)
    ran, projected = [], []
    for number, layer in enumerate(model.model.trunk.layers):
        layer.register_forward_hook(lambda *_, n=number: ran.append(n))
        layer.attention.k_proj.register_forward_hook(lambda *_, n=number: projected.append(n))
    output = model(ids, use_cache=False)
    assert ran == projected == [0] and (output.exit_layers == 1).all()
    ran.clear(), projected.clear()
    cache = model(ids, use_cache=True).past_key_values
    assert ran == [0] and projected == list(range(LAYERS))
    assert all(layer.keys.shape[-2] == 5 for layer in cache.layers)
    full = build(exit_threshold=1.0)
    close(full(ids).logits, build()(ids).logits, 1e-12)
    assert (full(ids).exit_layers == LAYERS).all() and build()(ids).exit_layers is None


@pytest.mark.parametrize("weights", ["uniform", "depth"])
def test_aligned_training(weights):
    model, ids = build(loss_weights=weights).train(), tokens(2, 6)
    labels = ids.clone()
    labels[0, 3] = -100
    states = model.model(ids, use_cache=False, output_hidden_states=True).hidden_states[1:-1]
    trunk = model.model.trunk
    answers = [model.lm_head(trunk.final_norm(one)) for one in states] + [model(ids, use_cache=False).logits]
    losses = [cross_entropy(one[:, :-1].flatten(0, 1), labels[:, 1:].flatten()) for one in answers]
    factors = [n if weights == "depth" else 1 for n in range(1, LAYERS + 1)]
    loss = model(ids, labels=labels).loss
    close(loss, sum(w * one for w, one in zip(factors, losses)) / sum(factors))
    loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    close(model.eval()(ids, labels=labels).loss, losses[-1])


@pytest.mark.parametrize("smoothing", [0.0, 2.0])
def test_gates_learn_where_the_target_is_likeliest(smoothing):
    fields = {"halting": "gates", "smoothing": smoothing, "depth_penalty": 0.05}
    model, ids = build(exit_weight=0.0, **fields).train(), tokens(1, 6)
    plain = model(ids, labels=ids).loss
    taught = build(exit_weight=0.3, **fields).train()
    run = taught.exits.watch(taught, True)
    output = taught(ids, use_cache=False)
    states = taught.model(ids, use_cache=False, exit_watch=run).last_hidden_state
    seen = [*(one for one, _ in run.seen), None]
    answers = [taught.exits.logits(taught, one, None) for one in seen[:-1]] + [taught.lm_head(states)]
    close(answers[-1], output.logits)
    total = 0.0
    for t in range(5):
        score = []
        for number, one in enumerate(answers):
            logs = [torch.log_softmax(one[0, s], -1)[ids[0, s + 1]] for s in range(5)]
            near = [
                torch.exp(torch.tensor(-((t - s) ** 2) / smoothing)).item() if smoothing else s == t for s in range(5)
            ]
            score.append(sum(k * log for k, log in zip(near, logs)) - 0.05 * number)
        best = int(torch.stack(score).argmax())
        chances = [torch.sigmoid(gate(one[0, t])) for gate, one in zip(taught.exits.gates, seen)]
        chosen = 1.0 if best == LAYERS - 1 else chances[best]
        for chance in chances[:best]:
            chosen = chosen * (1 - chance)
        total = total - torch.log(chosen)
    close(taught(ids, labels=ids).loss, plain + 0.3 * total.squeeze() / 5, 1e-6)


def test_mixed_training():
    """Each token is predicted where it left, from states that stay as they are above."""
    model, ids = build(training="mixed").train(), tokens(2, 6)
    torch.manual_seed(3)
    loss = model(ids, labels=ids).loss
    torch.manual_seed(3)
    drawn = torch.randint(1, LAYERS + 1, (2, 6))
    trunk = model.model.trunk
    states = trunk.embedding(trunk.embedding.lookup(ids), None, torch.arange(6)[None], trunk.position)
    context = trunk.make_context(states)
    for number, layer in enumerate(trunk.layers, start=1):
        layer.prepare(context, None)
        new = layer(states, None, context=context, step=number - 1)[0]
        states = torch.where((drawn < number)[..., None], states, new)
    logits = model.lm_head(trunk.final_norm(states))
    close(loss, cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()))
    loss.backward()
