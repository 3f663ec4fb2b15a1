"""The distilling encoder against loops, transformers' convolution layer, and its lengths."""

import math

import pytest
import torch
from transformers.models.informer.modeling_informer import InformerConvLayer

from hf_xformers import XFormerConfig, XFormerForMaskedLM, XFormerModel
from hf_xformers.stacks.distilling import DistillingSpec, DistillingStack
from hf_xformers.variants.informer import XFInformerConfig, XFInformerForSeq2SeqLM, XFInformerModel
from tests.attention.score_helpers import GEOMETRY, PADDING, WIDTH, vectors
from tests.helpers import NO_DROPOUT, close, make_strong, tokens

each_mode = pytest.mark.parametrize("mode", ["zeros", "circular"])


def build(mode="zeros", **fields):
    config = XFormerConfig(**GEOMETRY, **fields)
    torch.manual_seed(0)
    return DistillingStack(config, DistillingSpec(padding_mode=mode)).double()


def halved_by_hand(states, convolution, mode):
    """One text [n, D], place by place -> [ceil(n / 2), D]."""
    n, mixed = len(states), []
    for i in range(n):
        total = convolution.bias.clone()
        for offset in (-1, 0, 1):
            j = (i + offset) % n if mode == "circular" else i + offset
            if 0 <= j < n:
                total = total + convolution.weight[:, :, offset + 1] @ states[j]
        mixed.append(torch.where(total > 0, total, torch.exp(total) - 1))
    return torch.stack([torch.stack(mixed[max(2 * o - 1, 0) : 2 * o + 2]).amax(0) for o in range(math.ceil(n / 2))])


@each_mode
def test_halving(mode):
    stack, x = build(mode), vectors(4, 6)
    real = PADDING.sort(dim=1, descending=True, stable=True).values  # the stack has padding last
    found, kept = stack.halved(0, x, real)
    for b, n in enumerate(real.sum(1).tolist()):
        assert kept[b].sum() == math.ceil(n / 2)
        assert not found[b, math.ceil(n / 2) :].any()
        if n:
            close(found[b, : math.ceil(n / 2)], halved_by_hand(x[b, :n], stack.convolutions[0], mode))
    for length in (1, 2, 5, 6):
        found, kept = stack.halved(1, x[:, :length], None)
        assert kept is None
        close(found[0], halved_by_hand(x[0, :length], stack.convolutions[1], mode))


def test_transformers_layer():
    """transformers' layer, whose norm in evaluation is a factor and a bias of the convolution."""
    twin, stack, x = InformerConvLayer(WIDTH).double().eval(), build("circular"), vectors(2, 9)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for tensor in (twin.norm.weight, twin.norm.bias, twin.norm.running_mean, twin.norm.running_var):
            tensor.copy_(torch.rand(WIDTH, generator=generator))
        factor = twin.norm.weight / (twin.norm.running_var + twin.norm.eps).sqrt()
        stack.convolutions[0].weight.copy_(twin.downConv.weight * factor[:, None, None])
        stack.convolutions[0].bias.copy_((twin.downConv.bias - twin.norm.running_mean) * factor + twin.norm.bias)
        close(stack.halved(0, x, None)[0], twin(x))


def informer(cls=XFInformerModel, **fields):
    config = XFInformerConfig(**{**GEOMETRY, **NO_DROPOUT, "vocab_size": 99, **fields})
    torch.manual_seed(0)
    return make_strong(cls(config).double().eval())


def test_lengths():
    model = informer()
    with torch.no_grad():
        states = model(tokens(2, 13), output_hidden_states=True).hidden_states
    assert [state.shape[1] for state in states] == [13, 13, 7, 13]  # of the text, the layers, and brought back
    memory = informer(XFInformerForSeq2SeqLM)(tokens(2, 13), labels=tokens(2, 5)).encoder_last_hidden_state
    assert memory.shape[1] == 4


def test_upsampling():
    """What stands for a token is the state of its part of the text, and the first layer's."""
    up, down = informer(), informer(stack={"type": "distilling", "upsample": False})
    down.load_state_dict(up.state_dict())
    ids = tokens(2, 11)
    with torch.no_grad():
        whole, short = up(ids, output_hidden_states=True), down(ids)
    repeated = short.last_hidden_state[:, torch.arange(11) // 4]
    close(whole.last_hidden_state, repeated + whole.hidden_states[1])
    assert short.padding_mask.shape == (2, 3)


def test_refusals():
    fields = {**GEOMETRY, "stack": "distilling"}
    with pytest.raises(ValueError, match="fewer states than tokens"):
        XFormerForMaskedLM(XFormerConfig(**{**fields, "stack": {"type": "distilling", "upsample": False}}))
    with pytest.raises(ValueError, match="cannot stand in a decoder"):
        XFormerModel(XFormerConfig(**fields, is_decoder=True))
