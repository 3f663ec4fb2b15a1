"""Noisy top-k, GShard and prototyped experts against loops over tokens, and what their queues and losses may depend
on."""

import math

import pytest
import torch
from transformers import NllbMoeConfig
from transformers.models.nllb_moe.modeling_nllb_moe import NllbMoeSparseMLP

from tests.feedforward.expert_helpers import INNER, WIDTH, build, capacity, context, expert, padded, vectors
from tests.helpers import close

NOISY = {"type": "sparsely_gated_moe", "num_experts": 4, "topk": 2}
PAIRS = {"type": "gshard_moe", "num_experts": 4, "second_expert": "all"}
GROUPS = {"type": "expert_prototyping", "num_experts": 4, "num_prototypes": 2}
SPECS = {"sparsely_gated": NOISY, "gshard": PAIRS, "prototyping": GROUPS}
each_spec = pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
FACTORS = (None, 0.5, 1.0)


def normal_below(x: float) -> float:
    return 0.5 * (1 + math.erf(x / math.sqrt(2)))


def variation(values):
    mean = sum(values) / len(values)
    return sum((value - mean) ** 2 for value in values) / len(values) / mean**2


# ---------------------------------------------------------------------------------------------- sparsely gated


@pytest.mark.parametrize("topk", [2, 3, 4])
@pytest.mark.parametrize("training", [False, True])
def test_noisy_gates(topk, training):
    """Outputs and both losses, with the noise that was drawn; padding out of all of them."""
    module = build({**NOISY, "topk": topk, "bias": True}).train(training)
    states, mask = vectors(2, 5), torch.ones(2, 5, dtype=torch.bool)
    mask[1, 3:] = False
    torch.manual_seed(7)
    result = module(states, context(2, 5, mask))
    torch.manual_seed(7)
    noise = torch.randn(10, 4, dtype=torch.float64).view(2, 5, 4)
    output, importance, load = torch.zeros_like(states), [0.0] * 4, [0.0] * 4
    for b, t in mask.nonzero().tolist():
        x = states[b, t]
        clean = (module.router.weight @ x).tolist()
        spread = [math.log1p(math.exp(value)) for value in (module.noise.weight @ x).tolist()]
        logits = [c + n * s for c, n, s in zip(clean, noise[b, t].tolist(), spread)] if training else clean
        chosen = sorted(range(4), key=lambda e: -logits[e])[:topk]
        total = sum(math.exp(logits[e]) for e in chosen)
        for e in chosen:
            gate = math.exp(logits[e]) / total
            output[b, t] += gate * expert(module.experts, e, x)
            importance[e] += gate
        for e in range(4):
            others = sorted((logits[o] for o in range(4) if o != e), reverse=True)
            if topk == 4:
                load[e] += 1.0
            else:
                load[e] += normal_below((clean[e] - others[topk - 1]) / spread[e])
    close(result.output, output)
    close(result.aux_losses["router_importance"], torch.tensor(0.1 * variation(importance), dtype=torch.float64))
    close(result.aux_losses["router_load"], torch.tensor(0.1 * variation(load), dtype=torch.float64))


def test_load_is_a_probability():
    """The expected number of tokens an expert gets, and a gradient for both maps."""
    module = build(NOISY).train()
    states = vectors(1, 3)
    heard = []
    original = module.load
    module.load = lambda *given: heard.append(original(*given)) or heard[-1]
    counts, result = torch.zeros(4), module(states.expand(300, -1, -1), None)
    spread = torch.nn.functional.softplus(module.noise(states[0]))
    draws = module.router(states[0]) + torch.randn(20000, 3, 4) * spread
    for e in range(4):
        counts[e] = (draws.topk(2, -1).indices == e).any(-1).double().mean(0).sum()
    # Expected over the noise of the others, the probabilities are those of the draws: 5 deviations of 300 means.
    stack = heard[0].view(300, 3, 4).sum(1).detach()
    assert ((stack.mean(0) - counts).abs() < 5 * stack.std(0) / 300**0.5 + 0.03).all()
    found = torch.autograd.grad(result.aux_losses["router_load"], [module.router.weight, module.noise.weight])
    assert all(torch.count_nonzero(gradient) for gradient in found)


# ---------------------------------------------------------------------------------------------- gshard


def pairs_loop(module, states, factor, mask=None):
    """Algorithm 1, one text after the other: all first choices, then all second ones."""
    output, losses = torch.zeros_like(states), [[0.0] * 4, [0.0] * 4]
    mask = torch.ones(states.shape[:2], dtype=torch.bool) if mask is None else mask
    for b in range(states.shape[0]):
        real = mask[b].nonzero().flatten().tolist()
        limit, load = capacity(len(real), 4, factor), [0] * 4
        p = torch.softmax(states[b] @ module.router.weight.T, -1)
        order = p.argsort(-1, descending=True)
        for rank in (0, 1):
            for t in real:
                e = int(order[t, rank])
                gate = p[t, e] / (p[t, order[t, 0]] + p[t, order[t, 1]])
                if load[e] < limit:
                    output[b, t] += gate * expert(module.experts, e, states[b, t])
                load[e] += 1
                if rank == 0:
                    losses[0][e] += 1
                    losses[1] = [m + float(value) for m, value in zip(losses[1], p[t].detach())]
    count = int(mask.sum())
    return output, 4 * sum(f * m for f, m in zip(*losses)) / count**2


@pytest.mark.parametrize("factor", FACTORS)
def test_pairs(factor):
    module = build({**PAIRS, "capacity_factor": factor}).train()
    states, mask = vectors(2, 8), torch.ones(2, 8, dtype=torch.bool)
    mask[0, :3] = False
    for given in (None, mask):
        result = module(states, context(2, 8, given))
        output, balance = pairs_loop(module, states, factor, given)
        close(result.output, output)
        close(result.aux_losses["router_balance"], torch.tensor(0.01 * balance, dtype=torch.float64))


@pytest.mark.parametrize("size", [1, 3, 4, 8, 50])
def test_local_groups(size):
    """Each run of `size` real tokens of a text is routed as if it were alone (section 2.2: S = N / G tokens per group,
    C = 2 S / E); padding takes no place in any, and packed documents begin new ones."""
    module = build({**PAIRS, "capacity_factor": 1.0, "group_size": size}).train()
    states = vectors(2, 11)
    expected = torch.cat([pairs_loop(module, part, 1.0)[0] for part in states.split(size, dim=1)], 1)
    close(module(states, None).output, expected)
    for side in ("left", "right"):
        longer, mask, where = padded(states, side)
        close(module(longer, context(2, 14, mask)).output[:, where], expected)
    packed = module(states.reshape(1, 22, -1), context(1, 22, segments=torch.arange(22)[None] // 11)).output
    close(packed.view_as(expected), expected)
    whole = pairs_loop(module, states, 1.0)[0]
    assert size >= 11 or (whole - expected).abs().max() > 1e-3


@pytest.mark.parametrize("queue", ["position", "probability"])
@pytest.mark.parametrize("fraction", [0.125, 0.25, 1.0])
def test_same_as_transformers(queue, fraction):
    """NLLB-MoE's router and networks, weights copied: second expert always asked, gates normalised before tokens are
    dropped.

    Its capacity in evaluation is a share of the tokens of the whole batch, so the batch is one text. The sum over
    experts is written out here: in transformers 5.23 its own loop reads the router's 0/1 table as expert numbers and
    runs experts 0 and 1 alone.
    """
    config = NllbMoeConfig(
        d_model=WIDTH,
        num_experts=4,
        encoder_ffn_dim=INNER,
        activation_function="relu",
        second_expert_policy="all",
        normalize_router_prob_before_dropping=True,
        batch_prioritized_routing=queue == "probability",
        moe_eval_capacity_token_fraction=fraction,
        moe_token_dropout=0.0,
    )
    torch.manual_seed(0)
    theirs = NllbMoeSparseMLP(config, INNER).double().eval()
    theirs.router.dtype = torch.float64
    module = build({**PAIRS, "bias": True, "eval_capacity_factor": 4 * fraction, "queue": queue})
    states = vectors(1, 16)
    with torch.no_grad():
        module.router.weight.copy_(theirs.router.classifier.weight.normal_())
        for number in range(4):
            network = theirs.experts[f"expert_{number}"]
            for mine, other in (("up", network.fc1), ("down", network.fc2)):
                getattr(module.experts, f"{mine}_proj")[number] = other.weight
                getattr(module.experts, f"{mine}_bias")[number] = other.bias
        _, gates, _ = theirs.router(states[0])
        parts = [gates[:, e, None] * theirs.experts[f"expert_{e}"](states[0]) for e in range(4)]
        close(module(states, None).output[0], sum(parts))
    assert fraction == 1.0 or (gates != 0).sum() < 2 * 16  # some were dropped: the queue was tested


def test_second_expert_by_chance():
    """Asked with probability min(1, 2 g_2): the mean output over many draws, within 5 of its deviations."""
    module, states = build({**PAIRS, "second_expert": "random", "capacity_factor": None}), vectors(1, 4)
    p = torch.softmax(states[0] @ module.router.weight.T, -1)
    best, chosen = p.topk(2, -1)
    gates = best / best.sum(-1, keepdim=True)
    parts = torch.stack(
        [
            torch.stack([gates[t, j] * expert(module.experts, int(chosen[t, j]), states[0, t]) for j in (0, 1)])
            for t in range(4)
        ]
    )
    close(module(states, None).output[0], parts.sum(1))  # evaluation asks it always
    draws = module.train()(states.expand(1000, -1, -1), None).output.detach()
    chance = (2 * gates[:, 1]).clamp(max=1)
    expected = parts[:, 0] + chance[:, None] * parts[:, 1]
    allowed = 5 * ((chance * (1 - chance) / 1000).sqrt()[:, None] * parts[:, 1].abs()) + 1e-9
    assert ((draws.mean(0) - expected).abs() < allowed).all() and draws.std(0).max() > 1e-3


def test_second_choices_and_the_future():
    """With capacities a later token's first choice can push out an earlier one's second: the paper's, in an encoder or
    when asked for. A decoder is without capacity unless `decoder_capacity` says otherwise."""
    leaks = {}
    for name, fields, spec in (
        ("encoder", {}, {}),
        ("decoder", {"is_decoder": True}, {}),
        ("paper", {"is_decoder": True}, {"decoder_capacity": True}),
    ):
        module = build({**PAIRS, "capacity_factor": 2.0, **spec}, **fields).train()
        leaks[name] = 0
        for seed in range(40):
            states = vectors(1, 8, seed=seed)
            changed = states.clone()
            changed[0, 7] = vectors(1, seed=seed + 99)[0]
            change = (module(states, None).output - module(changed, None).output)[0, :7].abs().max()
            leaks[name] += int(change > 1e-12)
    assert leaks["decoder"] == 0 and leaks["encoder"] == leaks["paper"] > 0


# ---------------------------------------------------------------------------------------------- prototypes


@pytest.mark.parametrize("factor", FACTORS)
@pytest.mark.parametrize("kind", ["1x", "kx"])
def test_prototypes(factor, kind):
    module = build({**GROUPS, "capacity_factor": factor, "prototype_capacity": kind}).train()
    states = vectors(2, 7)
    result = module(states, None)
    output = torch.zeros_like(states)
    asked, chance = torch.zeros(2, 2).double(), torch.zeros(2, 2).double()
    for b in range(2):
        load = [0] * 4
        limit = math.inf if factor is None else capacity(7, 4, factor * (2 if kind == "kx" else 1))
        for t in range(7):
            logits = module.router.weight @ states[b, t]
            for z in (0, 1):
                p = torch.softmax(logits[2 * z : 2 * z + 2], -1)
                i = int(p.argmax())
                asked[z, i] += 1
                chance[z] += p
                if load[2 * z + i] < limit:
                    output[b, t] += p[i] * expert(module.experts, 2 * z + i, states[b, t])
                load[2 * z + i] += 1
    close(result.output, output)
    close(result.aux_losses["router_balance"], 0.01 * 2 * (asked / 14 * chance / 14).sum())


# ---------------------------------------------------------------------------------------------- all of them


@each_spec
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("training", [False, True])
def test_padding(spec, side, training):
    quiet = {"noise": False} if spec is NOISY else {"capacity_factor": 0.6}
    module = build({**spec, **quiet}).train(training)
    states = vectors(2, 5)
    expected = module(states, None)
    longer, mask, where = padded(states, side)
    result = module(longer, context(2, 8, mask))
    close(result.output[:, where], expected.output)
    assert (result.output[~mask] == 0).all()
    for name, loss in expected.aux_losses.items():
        close(result.aux_losses[name], loss)
    empty = module(longer, context(2, 8, torch.zeros_like(mask)))
    assert (empty.output == 0).all() and all(loss.isfinite() for loss in empty.aux_losses.values())
