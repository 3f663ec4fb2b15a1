"""Switch layers against a loop over tokens, and what a queue may depend on."""

import copy

import pytest
import torch

from hf_xformers import build_spec
from hf_xformers.feedforward import experts as experts_module
from hf_xformers.feedforward.dense import DenseFeedForward
from hf_xformers.feedforward.experts import Experts, grouped_matmul
from hf_xformers.feedforward.routing import capacities, places
from hf_xformers.feedforward.switch_transformer import SwitchFeedForward
from hf_xformers.variants.switch_transformer import XFSwitchTransformerConfig, XFSwitchTransformerModel
from tests.feedforward.expert_helpers import (
    WIDTH,
    build,
    capacity,
    context,
    expert,
    make_config,
    padded,
    vectors,
)
from tests.helpers import close

QUIET = {"type": "switch_transformer", "num_experts": 3, "jitter": 0.0}
FACTORS = (None, 0.5, 1.0, 1.25)


def loop(module, states, mask=None, factor=None):
    """Token after token: who goes where, what comes back, and the balance loss."""
    spec = module.spec
    batch, length = states.shape[:2]
    mask = torch.ones(batch, length, dtype=torch.bool) if mask is None else mask
    output = torch.zeros_like(states)
    asked, chance, logs, count = torch.zeros(spec.num_experts), torch.zeros(spec.num_experts).double(), 0.0, 0
    for b in range(batch):
        load = [0] * spec.num_experts
        limit = capacity(int(mask[b].sum()), spec.num_experts, factor)
        for t in range(length):
            if not mask[b, t]:
                continue
            logits = module.router.weight @ states[b, t]
            p = torch.softmax(logits, -1)
            i = int(p.argmax())
            asked[i] += 1
            chance = chance + p
            logs, count = logs + torch.logsumexp(logits, -1) ** 2, count + 1
            if load[i] < limit:
                output[b, t] = p[i] * expert(module.experts, i, states[b, t])
            load[i] += 1
    count = max(count, 1)
    balance = spec.num_experts * ((asked / count) * (chance / count)).sum()
    return output, balance, logs / count


@pytest.mark.parametrize("factor", FACTORS)
@pytest.mark.parametrize("bias", [False, True])
def test_formula(factor, bias):
    module = build({**QUIET, "capacity_factor": factor, "bias": bias, "z_loss_weight": 0.5}).train()
    states = vectors(2, 7)
    mask = torch.ones(2, 7, dtype=torch.bool)
    mask[1, :3] = False
    for given in (None, mask):
        result = module(states, context(2, 7, given))
        output, balance, logs = loop(module, states, given, factor)
        close(result.output, output)
        close(result.aux_losses["router_balance"], 0.01 * balance)
        close(result.aux_losses["router_z"], 0.5 * logs)
    if factor == 0.5:
        assert (output[0] == 0).all(-1).any()  # some were dropped: the queue was tested


def test_gradients_are_those_of_the_loop():
    module = build({**QUIET, "capacity_factor": 1.0, "bias": True}).train()
    states = vectors(2, 7).requires_grad_()
    weights = vectors(2, 7, seed=5)

    def of(output, balance):
        return torch.autograd.grad(
            (output * weights).sum() + balance,
            [states, *module.parameters()],
            allow_unused=True,
            materialize_grads=True,
        )

    result = module(states, None)
    output, balance, _ = loop(module, states, factor=1.0)
    for one, other in zip(of(result.output, result.aux_losses["router_balance"]), of(output, 0.01 * balance)):
        close(one, other)


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_number_of_tokens_is_a_bound_too(side):
    """It holds beside the factor, padding takes none of it, and later tokens do not count."""
    states = vectors(2, 7)
    for factor, limit in ((0.5, 8), (None, 2), (2.0, 2)):
        module = build({**QUIET, "capacity_factor": factor, "expert_capacity": limit}).train()
        longer, mask, where = padded(states, side)
        output = module(longer, context(2, 10, mask)).output[:, where]
        if factor == 0.5:
            close(output, build({**QUIET, "capacity_factor": factor}).train()(states, None).output)
            continue
        rows = module.router(states.flatten(0, 1)).argmax(-1).view(2, 7)
        taken = torch.stack([(rows[:, : i + 1] == rows[:, i : i + 1]).sum(-1) <= 2 for i in range(7)], dim=1)
        assert not taken.all()
        assert torch.equal((output != 0).any(-1), taken)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("factor", FACTORS)
def test_padding_takes_no_place(side, factor):
    module = build({**QUIET, "capacity_factor": factor}).train()
    states = vectors(2, 7)
    expected = module(states, None)
    longer, mask, where = padded(states, side)
    result = module(longer, context(2, 10, mask))
    close(result.output[:, where], expected.output)
    close(result.aux_losses["router_balance"], expected.aux_losses["router_balance"])
    assert (result.output[~mask] == 0).all()


def test_router_keeps_full_precision():
    module = build(QUIET).float()
    exact = module.router(vectors(4).float())
    half = copy.deepcopy(module).bfloat16()
    logits = half.router(vectors(4).bfloat16())
    assert logits.dtype == torch.float32
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(module.router(vectors(4).float()), exact)
        output = module(vectors(2, 4, dtype=torch.float32), None).output
    assert output.dtype == torch.float32 and output.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [WIDTH, 16])
def test_kernels_agree(dtype, width):
    """The grouped product of each precision, aligned or not, forward and backward, with idle experts and dropped
    tokens."""
    torch.manual_seed(0)
    exact = Experts(4, width, 2 * width, activation="relu", bias=True, dropout=0.0).double()
    with torch.no_grad():
        for parameter in exact.parameters():
            parameter.copy_(torch.randn_like(parameter))
    chosen = torch.tensor([[0], [4], [2], [0], [4], [2], [2]])
    states = vectors(7, width=width)
    found = []
    for module, rows in ((exact, states), (copy.deepcopy(exact).to(dtype), states.to(dtype))):
        rows = rows.clone().requires_grad_()
        output = module(rows, chosen, None)
        found.append([output, *torch.autograd.grad(output.sum(), [rows, *module.parameters()])])
    tolerance = 1e-4 if dtype == torch.float32 else 0.05
    for one, other in zip(*found):
        assert (other.double() - one).abs().max() <= tolerance * one.abs().max()
    assert (found[1][0][[1, 4]] == 0).all() and (found[1][1][[1, 4]] == 0).all()


@pytest.mark.parametrize("activation", ["relu", "gelu"])
@pytest.mark.parametrize("frozen", ["", "up", "down", "rows"])
def test_slices_and_groups_agree(monkeypatch, activation, frozen):
    """The CPU's way and the accelerators', with two choices, gates, dropped assignments, and parts that need no
    gradient."""
    torch.manual_seed(0)
    experts = Experts(3, 8, 16, activation=activation, bias=True, dropout=0.0).double()
    with torch.no_grad():
        for parameter in experts.parameters():
            parameter.copy_(torch.randn_like(parameter))
    for name, parameter in experts.named_parameters():
        parameter.requires_grad_(not frozen or not name.startswith(frozen))
    chosen = torch.tensor([[0, 2], [3, 0], [2, 3], [0, 3], [3, 3]])
    gates = vectors(5, width=2, seed=3).requires_grad_()
    rows = vectors(5, width=8).requires_grad_(frozen != "rows")
    found = []
    for sliced in (True, False):
        monkeypatch.setattr(experts_module, "counts_are_at_hand", lambda *_: sliced)
        output = experts(rows, chosen, gates)
        learned = [tensor for tensor in (rows, gates, *experts.parameters()) if tensor.requires_grad]
        found.append([output, *torch.autograd.grad((output * vectors(5, width=8, seed=4)).sum(), learned)])
    for one, other in zip(*found, strict=True):
        close(one, other)


def test_dropout_inside_experts():
    """The share that is left, scaled, forward and backward: with the mask that was drawn, the literal network."""
    experts = Experts(2, 8, 16, activation="relu", bias=False, dropout=0.5).double().train()
    with torch.no_grad():
        for parameter in experts.parameters():
            parameter.copy_(torch.randn_like(parameter))
    chosen, rows = torch.tensor([[0], [0], [1]]), vectors(3, width=8).requires_grad_()
    torch.manual_seed(4)
    output = experts(rows, chosen, None)
    torch.manual_seed(4)
    kept = torch.empty(3, 16, dtype=torch.bool).bernoulli_(0.5).double() * 2
    inner = torch.stack([experts.up_proj[e] @ rows[n] for n, e in enumerate((0, 0, 1))]).relu() * kept
    expected = torch.stack([experts.down_proj[e] @ inner[n] for n, e in enumerate((0, 0, 1))])
    close(output, expected)
    learned = [rows, *experts.parameters()]
    for one, other in zip(torch.autograd.grad(output.sum(), learned), torch.autograd.grad(expected.sum(), learned)):
        close(one, other)


@pytest.mark.parametrize(("layers", "sparse"), [(1, [0]), (2, [1]), (5, [1, 3])])
def test_every_second_layer(layers, sparse):
    config = make_config(num_hidden_layers=layers)
    spec = build_spec("feedforward", "switch_transformer")
    kinds = [type(spec.build(config, layer_idx=index)) for index in range(layers)]
    assert [index for index, kind in enumerate(kinds) if kind is SwitchFeedForward] == sparse
    assert all(kind in (SwitchFeedForward, DenseFeedForward) for kind in kinds)


def test_start():
    """Truncated normal of variance 0.1 / fan in (the paper's section 2.4)."""
    config = make_config(hidden_size=64, num_attention_heads=2, intermediate_size=128)
    module = build_spec("feedforward", "switch_transformer").build(config, layer_idx=1)
    module.initialize(config, torch.nn.init)
    for weight, fan_in in ((module.experts.up_proj, 64), (module.experts.down_proj, 128), (module.router.weight, 64)):
        std = (0.1 / fan_in) ** 0.5
        assert weight.abs().max() <= 2 * std
        assert abs(weight.std() / std - 0.88) < 0.04  # a normal cut at two deviations


def test_all_weights_start_small():
    """Variance 0.1 / fan in of every matrix, experts and routers among them; the query carries 1 / sqrt(d), too."""
    torch.manual_seed(0)
    config = XFSwitchTransformerConfig(
        vocab_size=99, hidden_size=64, num_hidden_layers=2, num_attention_heads=2, intermediate_size=256
    )
    model = XFSwitchTransformerModel(config)
    checked = 0
    for name, weight in model.named_parameters():
        if weight.ndim < 2 or "position" in name:
            continue
        fan_in = 1 if "tokens" in name else weight.shape[-1]
        expected = (0.1 / fan_in / (config.head_width if "q_proj" in name else 1)) ** 0.5
        assert weight.std().item() == pytest.approx(expected, rel=0.2), name
        checked += 1
    assert checked >= 14
    usual = XFSwitchTransformerModel(XFSwitchTransformerConfig(**{**config.to_dict(), "initializer_factor": 1.0}))
    assert usual.trunk.layers[0].attention.v_proj.weight.std().item() == pytest.approx(1 / 8, rel=0.1)


def test_jitter():
    """Training only; it moves the router's input, never what the experts and the caller see."""
    module, states = build({**QUIET, "jitter": 0.3, "capacity_factor": None}), vectors(1, 4)
    assert torch.equal(module(states, None).output, module(states, None).output)
    module.train()
    kept = states.clone()
    assert not torch.equal(module(states, None).output, module(states, None).output)
    assert torch.equal(states, kept)
    heard = []
    module.experts.register_forward_hook(lambda _, inputs, __: heard.append(inputs[0]))
    module(states, None)
    assert torch.equal(heard[0], states[0])


def test_pieces():
    assert places(torch.tensor([3, 1, 3, 3, 1])).tolist() == [0, 0, 1, 2, 1]
    texts, real = torch.zeros(10, dtype=torch.long), torch.ones(10, dtype=torch.bool)
    assert capacities(texts, real, 1, 1.1).unique().tolist() == [11]
    assert capacities(texts, real, 4, 1.0).unique().tolist() == [3]
    rows, weight = vectors(5, width=8), vectors(2, 8, seed=1, width=4)
    product = grouped_matmul(rows, weight, torch.tensor([2, 5], dtype=torch.int32))
    close(product, torch.cat([rows[:2] @ weight[0], rows[2:] @ weight[1]]))
