"""Gated experts with a shared one: against loops over tokens, the modules of four of transformers' families, and what
their balance follows."""

import copy

import pytest
import torch
from transformers import DeepseekV3Config, GptOssConfig, MixtralConfig, Qwen3NextConfig, Trainer, TrainingArguments
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MoE
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssMLP
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextSparseMoeBlock

from hf_xformers import XFormerConfig, XFormerForCausalLM, build_spec
from hf_xformers.feedforward import deepseek_moe, experts
from tests.feedforward.expert_helpers import WIDTH, build, context, padded, vectors
from tests.helpers import close, close_gradients, gradients

PLAIN = {"type": "deepseek_moe", "num_experts": 8, "topk": 3, "expert_size": 5}
SPECS = {
    "v3": {**PLAIN, "shared_size": 7, "groups": 4, "kept_groups": 2, "scale": 2.5, "balance_loss_weight": 0.3},
    "v2": {
        **{**PLAIN, "shared_size": 4, "groups": 2, "group_score": "best", "normalize": False, "scores": "softmax"},
        "balance_rate": None,
    },
    "qwen": {**PLAIN, "shared_size": 6, "shared_gate": True, "scores": "softmax", "balance_rate": None},
    "gpt_oss": {
        **{**PLAIN, "scores": "softmax", "bias": True, "router_bias": True, "limit": 0.8, "alpha": 1.3},
        "balance_rate": 0,
    },
}
each_spec = pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)


def made(spec, **fields):
    """With random biases where experts are chosen, so far below zero that scores with them are, too."""
    module = build(spec, **fields)
    if module.balance is not None:
        module.balance.bias.copy_(0.2 * vectors(width=8, seed=5) - 2.0)
    return module


def silu(x):
    return x / (1 + torch.exp(-x))


def network(module, e, x):
    """One expert on one vector."""
    spec, stacked = module.spec, module.experts
    both = stacked.gate_up_proj[e] @ x
    both = both if stacked.gate_up_bias is None else both + stacked.gate_up_bias[e]
    gate, up = both[: len(both) // 2], both[len(both) // 2 :]
    if spec.limit is None:
        inner = silu(gate) * up
    else:
        gate = torch.minimum(gate, gate.new_tensor(spec.limit))
        up = torch.maximum(torch.minimum(up, up.new_tensor(spec.limit)), up.new_tensor(-spec.limit))
        inner = gate / (1 + torch.exp(-spec.alpha * gate)) * (up + 1)
    output = stacked.down_proj[e] @ inner
    return output if stacked.down_bias is None else output + stacked.down_bias[e]


def choice(module, x):
    """The numbers of a token's experts, all scores."""
    spec, router = module.spec, module.router
    logits = router.weight @ x if router.bias is None else router.weight @ x + router.bias
    s = 1 / (1 + torch.exp(-logits)) if spec.scores == "sigmoid" else torch.exp(logits) / torch.exp(logits).sum()
    biased = (s if module.balance is None else s + module.balance.bias).tolist()
    size = spec.num_experts // spec.groups
    ranks = []
    for g in range(spec.groups):
        own = sorted(biased[g * size : (g + 1) * size], reverse=True)
        ranks.append(sum(own[:2]) if spec.group_score == "two" else own[0])
    kept = sorted(range(spec.groups), key=lambda g: -ranks[g])[: spec.kept_groups]
    allowed = [e for e in range(spec.num_experts) if e // size in kept]
    return sorted(allowed, key=lambda e: -biased[e])[: spec.topk], s


@each_spec
@pytest.mark.parametrize("path", ["slices", "groups"])
def test_equations(spec, path, monkeypatch):
    """Output, loss and all gradients, on both ways of computing experts; padding has no say."""
    if path == "groups":
        monkeypatch.setattr(experts, "counts_are_at_hand", lambda *_: False)
    module = made(spec).train()
    states, mask = vectors(2, 5).requires_grad_(), torch.ones(2, 5, dtype=torch.bool)
    mask[1, 3:] = False
    result = module(states, context(2, 5, mask))
    rows, share, probability = [], *torch.zeros(2, 8, dtype=torch.float64)
    for b, t in mask.nonzero().tolist():
        x = states[b, t]
        chosen, s = choice(module, x)
        total = sum(s[e] for e in chosen) if module.spec.normalize else 1.0
        y = sum(module.spec.scale * s[e] / total * network(module, e, x) for e in chosen)
        if module.shared is not None:
            inner = silu(module.shared.gate_proj.weight @ x) * (module.shared.up_proj.weight @ x)
            gate = 1 if module.shared_gate is None else 1 / (1 + torch.exp(-module.shared_gate.weight[0] @ x))
            y = y + gate * (module.shared.down_proj.weight @ inner)
        rows.append(y)
        share[chosen] += 1 / 3 / 8
        probability = probability + s / s.sum() / 8
    expected = torch.stack(rows)
    close(result.output[mask], expected)
    own, wanted = result.output[mask], expected
    if module.spec.balance_loss_weight:
        loss = 0.3 * 8 * (share * probability).sum()
        close(result.aux_losses["router_balance"], loss)
        own, wanted = own + result.aux_losses["router_balance"], wanted + loss
    else:
        assert not result.aux_losses
    close_gradients(gradients(module, own), gradients(module, wanted))


def copied(module, theirs, transpose=False):
    """The weights of one of transformers' blocks in ours."""
    turn = (lambda x: x.mT) if transpose else (lambda x: x)
    gate = theirs.router if transpose else theirs.gate
    state = {"router.weight": gate.weight, "experts.down_proj": turn(theirs.experts.down_proj)}
    up = turn(theirs.experts.gate_up_proj)
    if transpose:  # gate and what it gates stand side by side
        order = torch.cat([torch.arange(0, up.shape[1], 2), torch.arange(1, up.shape[1], 2)])
        state["experts.gate_up_bias"] = theirs.experts.gate_up_proj_bias[:, order]
        state["experts.down_bias"], state["router.bias"] = theirs.experts.down_proj_bias, gate.bias
        up = up[:, order]
    state["experts.gate_up_proj"] = up
    if hasattr(gate, "e_score_correction_bias"):
        state["balance.bias"] = gate.e_score_correction_bias
    shared = getattr(theirs, "shared_experts", getattr(theirs, "shared_expert", None))
    if shared is not None:
        state.update({f"shared.{name}": tensor for name, tensor in shared.state_dict().items()})
    if hasattr(theirs, "shared_expert_gate"):
        state["shared_gate.weight"] = theirs.shared_expert_gate.weight
    module.load_state_dict(state)
    return module


def strong(theirs):
    torch.manual_seed(2)
    for tensor in (*theirs.parameters(), *theirs.buffers()):
        tensor.data.normal_(std=0.5)
    return theirs.eval()


SIZES = {"hidden_size": WIDTH, "num_attention_heads": 2, "num_experts_per_tok": 3}
PARTNERS = {
    "deepseek_v3": (
        lambda: DeepseekV3MoE(
            DeepseekV3Config(
                **{**SIZES, "n_routed_experts": 8, "moe_intermediate_size": 5, "n_shared_experts": 2, "n_group": 4},
                topk_group=2,
            )
        ),
        {**PLAIN, "shared_size": 10, "groups": 4, "kept_groups": 2, "scale": 2.5},
    ),
    "qwen3_next": (
        lambda: Qwen3NextSparseMoeBlock(
            Qwen3NextConfig(
                **{**SIZES, "num_experts": 8, "moe_intermediate_size": 5, "shared_expert_intermediate_size": 7}
            )
        ),
        {**SPECS["qwen"], "shared_size": 7},
    ),
    "mixtral": (
        lambda: MixtralSparseMoeBlock(MixtralConfig(**SIZES, num_local_experts=8, intermediate_size=5)),
        {**PLAIN, "scores": "softmax", "balance_rate": None},
    ),
    "gpt_oss": (
        lambda: GptOssMLP(GptOssConfig(**SIZES, num_local_experts=8, intermediate_size=5, swiglu_limit=0.8)),
        {**SPECS["gpt_oss"], "alpha": 1.702, "balance_rate": None},
    ),
}


@pytest.mark.parametrize("name", PARTNERS)
def test_same_as_transformers(name):
    make, spec = PARTNERS[name]
    theirs = strong(make())
    module = copied(build(spec, dtype=torch.float32), theirs, transpose=name == "gpt_oss")
    states = vectors(3, 7, dtype=torch.float32)
    with torch.no_grad():
        expected, found = theirs(states), module(states, None).output
    expected = expected[0] if isinstance(expected, tuple) else expected
    assert float((found - expected).abs().max()) < 2e-6 * float(expected.abs().max())


@each_spec
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding(spec, side):
    module, states = made(spec).train(), vectors(2, 5)
    expected = module(states, None)
    longer, mask, where = padded(states, side)
    result = module(longer, context(2, 8, mask))
    close(result.output[:, where], expected.output)
    for name, loss in expected.aux_losses.items():
        close(result.aux_losses[name], loss)
    assert all(loss.isfinite() for loss in module(longer, context(2, 8, ~mask & False)).aux_losses.values())


# ---------------------------------------------------------------------------------------------- balance


def trained(**changes):
    module = made({**SPECS["v3"], "balance_rate": 0.01, **changes}).train()
    return module, torch.optim.SGD(module.parameters(), lr=0.0)


def loads(module, states, mask=None):
    """How many of the real tokens chose each expert."""
    counts = [0] * 8
    for b, t in (torch.ones(states.shape[:2]) if mask is None else mask).nonzero().tolist():
        for e in choice(module, states[b, t])[0]:
            counts[e] += 1
    return torch.tensor(counts, dtype=torch.float64)


def after(bias, counts, rate=0.01):
    return bias + rate * torch.sign(counts.mean() - counts)


def test_biases_follow_the_loads_of_a_step():
    """Of all its batches, real tokens alone; passes of evaluation and without gradients do not count, nor does a step
    of another optimizer."""
    module, optimizer = trained()
    first, second, bias = vectors(2, 6), vectors(2, 6, seed=1), module.balance.bias.clone()
    mask = torch.ones(2, 6, dtype=torch.bool)
    mask[0, 2:] = False
    counts = loads(module, first, mask) + loads(module, second)
    module(first, context(2, 6, mask)).output.sum().backward()
    module(second, None).output.sum().backward()
    with torch.no_grad():
        module(5 * first, None)
    module.eval()(3 * second, None)
    torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1).step()
    assert torch.equal(module.balance.bias, bias)
    optimizer.step()
    close(module.balance.bias, after(bias, counts))
    optimizer.step()  # nothing was counted
    close(module.balance.bias, after(bias, counts))


def test_loads_of_all_processes(monkeypatch):
    module, optimizer = trained()
    elsewhere = torch.tensor([90.0, 0, 0, 0, 0, 0, 0, 0], dtype=torch.float64)
    monkeypatch.setattr(deepseek_moe, "sum_over_processes", lambda found: found + elsewhere)
    states, bias = vectors(2, 6), module.balance.bias.clone()
    counts = loads(module, states) + elsewhere
    module(states, None)
    optimizer.step()
    close(module.balance.bias, after(bias, counts))


@pytest.mark.parametrize("still", ["rate", "frozen"])
def test_biases_that_stay(still):
    module, optimizer = trained(**({"balance_rate": 0} if still == "rate" else {}))
    if still == "frozen":
        module.router.requires_grad_(False)
    before = module.balance.bias.clone()
    module(vectors(2, 6), None)
    optimizer.step()
    assert torch.equal(module.balance.bias, before)


def test_a_copy_follows_its_own_optimizer():
    module, optimizer = trained()
    other = copy.deepcopy(module)
    before = module.balance.bias.clone()
    other(vectors(2, 6), None)
    optimizer.step()
    assert torch.equal(other.balance.bias, before)
    torch.optim.SGD(other.parameters(), lr=0.0).step()
    assert not torch.equal(other.balance.bias, before) and torch.equal(module.balance.bias, before)


def test_trainer_of_transformers_moves_them(tmp_path):
    """Once for each of its steps, of two batches."""
    config = XFormerConfig(
        **{"vocab_size": 20, "hidden_size": 8, "num_attention_heads": 2, "num_hidden_layers": 1},
        feedforward={**PLAIN, "balance_rate": 1e-4},  # too little to turn the second step around
    )
    torch.manual_seed(0)
    model = XFormerForCausalLM(config)
    ids = torch.randint(0, 20, (8, 6), generator=torch.Generator().manual_seed(0))
    arguments = TrainingArguments(
        **{"output_dir": str(tmp_path), "max_steps": 2, "per_device_train_batch_size": 2, "report_to": []},
        **{"gradient_accumulation_steps": 2, "use_cpu": True, "save_strategy": "no", "disable_tqdm": True},
    )
    rows = [{"input_ids": row, "labels": row} for row in ids]
    Trainer(model, arguments, train_dataset=rows).train()
    moved = model.model.trunk.layers[0].feedforward.balance.bias / 1e-4
    assert moved.abs().max() <= 2 + 1e-6 and moved.abs().sum() > 4
    torch.testing.assert_close(moved, moved.round(), atol=1e-4, rtol=0)


def test_loads_become_equal():
    """Without a loss and with the same weights."""
    module, optimizer = trained(balance_rate=0.02, groups=1, kept_groups=1)
    module.balance.bias.zero_()
    states = vectors(8, 32) + vectors(1, 1, seed=1)
    before = loads(module, states)
    for _ in range(60):
        module(states, None)
        optimizer.step()
    now = loads(module, states)
    assert before.max() > 1.5 * before.mean() and now.max() < 1.25 * now.mean()


def test_biases_stay_in_full_precision():
    module = made(SPECS["v3"], dtype=torch.float32).bfloat16()
    assert module.balance.bias.dtype == torch.float32 and module.router.weight.dtype == torch.bfloat16
    assert module(vectors(1, 4).bfloat16(), None).output.dtype == torch.bfloat16


def test_dropout_inside_experts():
    """Scaled, with gradients that a change of the weights shows."""
    module = made({**SPECS["v3"], "expert_dropout": 0.5}).train()
    states = vectors(4, 40)
    outputs = []
    for seed in range(200):
        torch.manual_seed(seed)
        outputs.append(module(states, None).output)
    mean, plain = torch.stack(outputs).mean(0), module.eval()(states, None).output
    assert float(((mean - plain).abs().mean() / plain.abs().mean()).detach()) < 0.1


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"groups": 3}, "`num_experts` 8 must be whole `groups`"),
        ({"groups": 2, "kept_groups": 3}, "`kept_groups` are at most all, got 2 and 3"),
        ({"groups": 8, "kept_groups": 4}, "have no two best; use `group_score='best'`"),
        ({"topk": 5, "groups": 2}, "`topk` 5 is more than the 4 experts"),
        ({"shared_gate": True}, "give it a `shared_size`"),
        ({"limit": 0}, "needs `limit` > 0, got 0"),
        ({"balance_rate": -1}, "needs `balance_rate` >= 0, got -1"),
    ],
)
def test_refusals(wrong, said):
    with pytest.raises(ValueError, match=said):
        build_spec("feedforward", {**PLAIN, **wrong})
