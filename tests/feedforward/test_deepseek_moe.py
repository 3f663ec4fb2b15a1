"""Gated experts with a shared one: against loops over tokens, and what their balance follows."""

import pytest
import torch
from transformers import Trainer, TrainingArguments

from hf_xformers import XFormerConfig, XFormerForCausalLM
from hf_xformers.feedforward import deepseek_moe, experts
from tests.feedforward.expert_helpers import build, context, vectors
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


def test_biases_stay_in_full_precision():
    module = made(SPECS["v3"], dtype=torch.float32).bfloat16()
    assert module.balance.bias.dtype == torch.float32 and module.router.weight.dtype == torch.bfloat16
    assert module(vectors(1, 4).bfloat16(), None).output.dtype == torch.bfloat16


def test_dropout_inside_experts():
    """Scaled, with gradients that a change of the weights shows."""
    module = made({**SPECS["v3"], "expert_dropout": 0.5}).train()
    states = vectors(4, 40)
    torch.manual_seed(0)
    mean = module(states.repeat(200, 1, 1), None).output.unflatten(0, (200, 4)).mean(0)
    plain = module.eval()(states, None).output
    assert float(((mean - plain).abs().mean() / plain.abs().mean()).detach()) < 0.1
