"""PowerNorm against its algorithm written out step by step, its limits, and what its statistics may see."""

import copy

import pytest
import torch

from hf_xformers import XFormerConfig, XFormerForMaskedLM, XFormerModel, build_spec
from hf_xformers.core.components import names
from tests.helpers import NO_DROPOUT, close, close_gradients, make_strong

WIDTH = 6
SIZES = dict(
    vocab_size=40,
    hidden_size=12,
    num_hidden_layers=2,
    num_attention_heads=2,
    intermediate_size=16,
    normalization="power_norm",
    **NO_DROPOUT,
)


def build(**fields):
    config = XFormerConfig(hidden_size=WIDTH, num_attention_heads=2, normalization={"type": "power_norm", **fields})
    return make_strong(config.normalization.build(config).double(), amount=0.5)


def vectors(*shape, seed=0):
    return torch.randn(*shape, WIDTH, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


class Written:
    """Algorithms 1 and 2 of the paper with warm-up, channel by channel on a list of real tokens."""

    def __init__(self, norm):
        self.gamma, self.beta = norm.weight.detach().clone(), norm.bias.detach().clone()
        self.psi2, self.nu, self.step = torch.ones(WIDTH).double(), torch.zeros(WIDTH).double(), 0
        self.norm = norm

    def train(self, x, g):
        """x, g [N, D] -> output, dx, dgamma, dbeta."""
        a, b, warmup, eps = self.norm.settings
        square = (x * x).mean(0)
        psi = ((square if self.step < warmup else self.psi2) + eps).sqrt()
        y = x / psi
        inner = self.gamma * g
        dx = (inner - self.nu * y) / psi
        spread, slope = (y * y).mean(0), (inner * y).mean(0)
        self.nu = self.nu * (1 - (1 - b) * spread) + (1 - b) * slope
        if self.step < warmup:
            self.psi2 = (self.psi2 * self.step + square) / (self.step + 1)
        else:
            self.psi2 = a * self.psi2 + (1 - a) * square
        self.step += 1
        return self.gamma * y + self.beta, dx, (g * y).sum(0), g.sum(0)


@pytest.mark.parametrize("warmup", [0, 2, 10])
def test_algorithm(warmup):
    """Five steps, some warm: outputs, gradients, statistics; then evaluation with the running mean square."""
    norm = build(group_num=None, warmup_iters=warmup, alpha_fwd=0.8, alpha_bwd=0.7).train()
    written = Written(norm)
    for step in range(5):
        x, g = vectors(2, 7, seed=step).requires_grad_(), vectors(2, 7, seed=step + 30)
        mask = torch.rand(2, 7, generator=torch.Generator().manual_seed(step)) < 0.7
        output = norm(x, mask)
        found = torch.autograd.grad((output * g)[mask].sum(), [x, norm.weight, norm.bias])
        expected = written.train(x.detach()[mask], g[mask])
        close(output[mask], expected[0])
        close(found[0][mask], expected[1])
        close(found[1], expected[2])
        close(found[2], expected[3])
        assert (found[0][~mask] == 0).all()
        close(norm.running_square, written.psi2)
        close(norm.running_gradient, written.nu)
        assert norm.steps == step + 1
    x = vectors(3)
    close(norm.eval()(x), norm.weight * x / (written.psi2 + 1e-5).sqrt() + norm.bias)


def test_groups():
    """Each token's groups of channels have mean square 1 before the statistics see them."""
    norm, plain = build(group_num=3).train(), build(group_num=None).train()
    x = vectors(2, 5)
    grouped = torch.cat([c / (c.square().mean(-1, keepdim=True) + 1e-5).sqrt() for c in x.split(2, -1)], -1)
    close(norm(x), plain(grouped))
    torch.autograd.gradcheck(norm.scale_groups, (x.requires_grad_(),))


def test_padding_changes_nothing():
    for side in ("left", "right"):
        one, other = build().train(), build().train()
        x, g = vectors(2, 5).requires_grad_(), vectors(2, 5, seed=3)
        pads = 9 * vectors(2, 3, seed=8)
        mask = torch.ones(2, 8, dtype=torch.bool)
        where = slice(3, 8) if side == "left" else slice(0, 5)
        mask[:, [i for i in range(8) if not where.start <= i < where.stop]] = False
        for _ in range(2):
            longer = torch.cat([pads, x] if side == "left" else [x, pads], 1)
            outputs = one(x), other(longer, mask)[:, where]
            close(outputs[1], outputs[0])
            close(*(torch.autograd.grad((output * g).sum(), x)[0] for output in outputs))
        close(other.running_square, one.running_square)
        close(other.running_gradient, one.running_gradient)


def test_what_a_token_depends_on():
    """Evaluation and running statistics: on itself. During warm-up: on the batch, as the method has it."""
    x, other = vectors(2, 4), vectors(2, 4)
    other[1, 3] = 5 * vectors(1, seed=7)[0]
    for warmup, training, alone in ((9, False, True), (0, True, True), (9, True, False)):
        norm = build(warmup_iters=warmup).train(training)
        change = (norm(x) - norm(other)).abs().sum(-1)
        change[1, 3] = 0
        assert (change.max() < 1e-12) == alone


def test_when_statistics_move():
    """Not without a backward pass, not for padding alone, not for an overflow, not when frozen."""
    norm, x = build().train(), vectors(4)
    before = copy.deepcopy(norm.state_dict())

    def same():
        return all(torch.equal(value, before[key]) for key, value in norm.state_dict().items())

    norm(x)
    with torch.no_grad():
        norm(x)
    norm(x, torch.zeros(4, dtype=torch.bool)).sum().backward()
    (norm(x) * torch.inf).sum().backward()
    assert same()
    frozen = norm.requires_grad_(False)(x.clone().requires_grad_())
    frozen.sum().backward()
    assert same()
    close(frozen, norm.eval()(x))
    norm.train().requires_grad_(True)(x).sum().backward()
    assert not same() and norm.steps == 1


def model(**fields):
    torch.manual_seed(0)
    return make_strong(XFormerForMaskedLM(XFormerConfig(**{**SIZES, **fields})).double()).train()


@pytest.mark.parametrize("residual", ["post_ln", "pre_ln"])
def test_in_a_model(residual):
    """Padding reaches every norm, the last one included: a padded training step is that of the texts alone."""
    ids, mask = torch.randint(1, 40, (2, 6)), torch.ones(2, 6, dtype=torch.long)
    longer = torch.cat([torch.randint(1, 40, (2, 3)), ids], 1)
    one, other = model(residual=residual), model(residual=residual)
    labels = torch.cat([torch.full((2, 3), -100), ids], 1)
    losses = one(ids, labels=ids).loss, other(longer, torch.cat([mask[:, :3] * 0, mask], 1), labels=labels).loss
    close(*losses)
    for loss in losses:
        loss.backward()
    for (name, buffer), (_, expected) in zip(other.named_buffers(), one.named_buffers()):
        close(buffer.double(), expected.double())
    close_gradients(*({n: p.grad[:6] for n, p in net.named_parameters() if "table" in n} for net in (other, one)))
    assert {int(buffer) for name, buffer in one.named_buffers() if name.endswith("steps")} == {1}


@pytest.mark.parametrize(
    "changes",
    [
        {"attention": {"type": "star_transformer", "norm_inputs": True}},
        {"attention": {"type": "feedback", "window": 3}, "stack": "feedback", "is_decoder": True},
    ],
    ids=["star_transformer", "feedback"],
)
def test_norms_of_components(changes):
    """What stands at padding reaches no norm of tokens that a component has besides those of its frame."""
    torch.manual_seed(0)
    one = make_strong(XFormerModel(XFormerConfig(**{**SIZES, **changes})).double()).train()
    other, mask = copy.deepcopy(one), torch.ones(3, 6, dtype=torch.bool)
    mask[2, 3:] = False
    ids = torch.randint(1, 40, (3, 6))
    states = one(ids, mask)[0][mask], other(torch.where(mask, ids, 39 - ids), mask)[0][mask]
    close(*states)
    for found in states:
        found.square().sum().backward()
    close(*(torch.cat([buffer.reshape(-1).double() for buffer in net.buffers()]) for net in (other, one)))


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"normalization": {"type": "power_norm", "group_num": 5}}, "group_num"),
        ({"head": "transform"}, "transform"),
        ({"embedding": {"type": "token", "normalize": True}}, "normalize"),
        ({"residual": {"type": "pre_ln", "final_dropout": True}}, "final_dropout"),
    ],
)
def test_refusals(wrong, said):
    with pytest.raises(ValueError, match=said):
        XFormerConfig(**{**SIZES, **wrong})
    assert "power_norm" in names("normalization") and build_spec("normalization", "power_norm").warmup_iters == 10_000
