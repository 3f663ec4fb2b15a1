"""Admin: the sum by formula, its starts, and the profile of a batch against the recursion."""

import math

import pytest
import torch

from hf_xformers import XFormerConfig, XFormerForMaskedLM, XFormerForSeq2SeqLM
from hf_xformers.normalization.admin import Admin, profile
from tests.helpers import close, make_strong

SIZES = dict(vocab_size=40, hidden_size=16, num_hidden_layers=3, num_attention_heads=2, intermediate_size=24)
SIZES.update(embedding={"type": "token", "scale": True}, position="sinusoidal_absolute", initializer="xavier")


def model(cls=XFormerForMaskedLM, strong=True, **admin):
    torch.manual_seed(0)
    net = cls(XFormerConfig(**SIZES, residual={"type": "admin", **admin})).double()
    return (make_strong(net) if strong else net).eval()


def frames(net):
    return [module for module in net.modules() if isinstance(module, Admin)]


def test_formula():
    net = model()
    frame, x, f = frames(net)[0], torch.randn(2, 3, 16).double(), torch.randn(2, 3, 16).double()
    total = x * frame.omega + f
    expected = (total - total.mean(-1, keepdim=True)) / (total.var(-1, correction=0, keepdim=True) + 1e-5).sqrt()
    close(frame.leave(x, f), expected * frame.norm.weight + frame.norm.bias)


@pytest.mark.parametrize(("start", "named"), [("logn", "O(logn)"), ("constant", "O(1)"), ("linear", "O(n)")])
def test_starts(start, named):
    """Six sublayers; the authors' package gives the same number."""
    expected = {"logn": math.sqrt(7 / math.log(7) - 1), "constant": math.sqrt(6), "linear": 1.0}[start]
    for frame in frames(model(start=start, strong=False)):
        close(frame.omega, torch.full((16,), expected, dtype=torch.float64), 1e-6)  # built in float32
    package = pytest.importorskip("admin_torch", reason="the package `admin-torch` is not installed")
    theirs = package.as_module(6, named, as_parameter=True, embed_dim=16)
    x, f = torch.randn(2, 16), torch.randn(2, 16)
    frame = frames(model(start=start, strong=False))[0].float()
    close(theirs(x, f), x * frame.omega + f, 1e-6)


def test_towers_count_for_themselves():
    """Two sublayers a layer in an encoder, three in a decoder that reads it."""
    net = model(XFormerForSeq2SeqLM, strong=False)
    starts = [
        {round(float(frame.start), 6) for frame in frames(tower)} for tower in (net.model.trunk, net.model.decoder)
    ]
    assert starts == [{round(math.sqrt((n + 1) / math.log(n + 1) - 1), 6)} for n in (6, 9)]


@pytest.mark.parametrize("padded", [False, True])
def test_profile(padded):
    """The recursion, written out over the layers in float64 on real tokens alone; dropout off, the mode kept."""
    net = model(start="profile").train()
    ids, mask = torch.randint(1, 40, (2, 7)), torch.ones(2, 7, dtype=torch.long)
    if padded:
        mask[1, :3] = 0
    profile(net, input_ids=ids, attention_mask=mask)
    assert net.training
    tower, real = net.eval().model.trunk, mask.bool()
    heard = []
    for layer in tower.layers:
        for part in (layer.attention, layer.feedforward):
            part.register_forward_hook(lambda _, inputs, output: heard.append((inputs[0], output.output)))
    net(ids, attention_mask=mask)
    variance = torch.ones(()).double()
    for frame, (x, f) in zip(frames(net), heard, strict=True):
        close(frame.omega, variance.sqrt().expand(16))
        parts = (frame.omega * x)[real], f[real]
        variance = sum((part - part.mean()).square().mean() for part in parts)
    omegas = [float(frame.omega[0].detach()) for frame in frames(net)]
    assert omegas == sorted(omegas) and omegas[-1] > 1.01


def test_profile_of_two_towers():
    net = model(XFormerForSeq2SeqLM, start="profile")
    ids = torch.randint(1, 40, (2, 7))
    profile(net, input_ids=ids, labels=ids)
    for tower in (net.model.trunk, net.model.decoder):
        found = [float(frame.omega[0].detach()) for frame in frames(tower)]
        assert found[0] == 1.0 and found[-1] > 1.0 and all(bool(frame.profiled) for frame in frames(tower))


def test_training_waits_for_a_profile(tmp_path):
    net, ids = model(start="profile"), torch.randint(1, 40, (2, 7))
    net(ids)
    with pytest.raises(ValueError, match="profile"):
        net.train()(ids)
    profile(net, input_ids=ids)
    net(ids)
    net.save_pretrained(tmp_path)
    again = XFormerForMaskedLM.from_pretrained(tmp_path, dtype=torch.float64).train()
    again(ids)
    for frame, expected in zip(frames(again), frames(net)):
        close(frame.omega, expected.omega)
    with pytest.raises(ValueError, match="admin"):
        profile(XFormerForMaskedLM(XFormerConfig(**SIZES)), input_ids=ids)
