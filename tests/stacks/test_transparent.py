"""Transparent attention: the mixtures by hand, their dropout, and decoders of another kind."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from transformers.modeling_outputs import BaseModelOutput

from hf_xformers import XFormerConfig, XFormerForSeq2SeqLM
from tests.helpers import NO_DROPOUT, close, make_strong, pad, tokens

SIZES = {
    "vocab_size": 99,
    "hidden_size": 16,
    "num_hidden_layers": 3,
    "num_decoder_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "is_encoder_decoder": True,
    **NO_DROPOUT,
}
RESIDUALS = ("post_ln", "pre_ln")


def model(cls=XFormerForSeq2SeqLM, stack="transparent", **fields):
    torch.manual_seed(0)
    return make_strong(cls(XFormerConfig(**{**SIZES, **fields, "stack": stack})).double().eval(), amount=0.3)


def memories_read(net, **given):
    """What each decoder layer's cross-attention was given."""
    seen = []
    hooks = [
        layer.cross_attention.register_forward_pre_hook(
            lambda module, args, kwargs: seen.append(kwargs["memory"]), with_kwargs=True
        )
        for layer in net.get_decoder().layers
    ]
    net(**given)
    for hook in hooks:
        hook.remove()
    return seen


@pytest.mark.parametrize("residual", RESIDUALS)
def test_mixtures_by_hand(residual):
    """Layer j reads sum_i softmax(W[:, j])_i H_i, normalised where the encoder normalises its last state."""
    net = model(residual=residual)
    encoder, states = net.get_encoder(), []
    encoder.layers[0].register_forward_pre_hook(lambda module, args: states.append(args[0]))
    for layer in encoder.layers:
        layer.register_forward_hook(lambda module, args, output: states.append(output[0]))
    ids, mask = pad([tokens(7), tokens(4, seed=1)], 7, "right")
    with torch.no_grad():
        seen = memories_read(net, input_ids=ids, attention_mask=mask, decoder_input_ids=tokens(2, 5))
        assert len(states) == 4 and len(seen) == 2
        for column, memory in enumerate(seen):
            scores = [float(encoder.stack.mixture[row, column]) for row in range(4)]
            total = sum(torch.tensor(score, dtype=torch.float64).exp() for score in scores)
            expected = sum(
                torch.tensor(score, dtype=torch.float64).exp() / total * state for score, state in zip(scores, states)
            )
            if residual == "pre_ln":
                expected = encoder.final_norm(expected)
            close(memory, expected)
        assert (seen[0] - seen[1]).abs().max() > 1e-3, "both layers read the same"


def test_padding_moves_no_statistics_of_memories():
    net, (ids, mask) = (
        model(residual="pre_ln", normalization="power_norm").train(),
        pad([tokens(7), tokens(4)], 7, "right"),
    )
    given = {"attention_mask": mask, "decoder_input_ids": tokens(2, 5)}
    close(*(copy.deepcopy(net)(ids.masked_fill(mask == 0, other), **given).logits for other in (5, 50)))


def test_weights_are_dropped_in_training():
    """About a tenth of the weights; the others grow by the same factor."""
    net = model(stack={"type": "transparent", "weight_dropout": 0.4}, num_hidden_layers=5, num_decoder_layers=3)
    stack, ids = net.get_encoder().train().stack, tokens(1, 3)
    with torch.no_grad():
        stack.mixture.zero_()
        torch.manual_seed(0)
        dropped = net.get_encoder()(ids).memories
        torch.manual_seed(0)
        scale = nn.functional.dropout(torch.full((6, 3), 1 / 6, dtype=torch.float64), 0.4)
        states = net.eval().get_encoder()(ids, output_hidden_states=True).hidden_states
        expected = torch.stack(
            [sum(scale[row, column] * states[row] for row in range(6)) for column in range(3)], dim=1
        )
    assert (scale == 0).any()
    close(dropped, expected)


def test_decoder_of_another_kind():
    """A decoder that runs one layer many times reads one memory per run."""
    net = model(decoder={"stack": "universal", "position": "none"}, num_decoder_layers=3)
    assert len(net.get_decoder().layers) == 1 and net.get_encoder().stack.mixture.shape == (4, 3)
    seen = memories_read(net, input_ids=tokens(2, 5), decoder_input_ids=tokens(2, 3))
    memories = net.get_encoder()(tokens(2, 5)).memories
    assert all(torch.equal(one, two) for one, two in zip(seen, memories.unbind(1), strict=True))


def test_last_state_alone_is_refused():
    net, ids = model(), tokens(2, 5)
    state = net.get_encoder()(ids).last_hidden_state
    for outputs in (BaseModelOutput(last_hidden_state=state), (state,)):
        with pytest.raises(ValueError, match="reads a memory of its own, which the given `encoder_outputs` lack"):
            net(encoder_outputs=outputs, decoder_input_ids=ids)


def test_wrong_number_of_memories():
    net, ids = model(), tokens(2, 5)
    with pytest.raises(ValueError, match="runs 2 layers, .* hold 3 memories"):
        net.get_decoder()(input_ids=ids, encoder_hidden_states=torch.zeros(2, 3, 5, 16, dtype=torch.float64))
