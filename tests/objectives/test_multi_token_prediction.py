"""Multi-token prediction: its loss written out, with padding and documents, and what is left of it after training."""

import copy
import itertools
import statistics

import pytest
import torch

from hf_xformers import XFormerConfig, XFormerForCausalLM, XFormerForMultiTokenPrediction, XFormerModel
from hf_xformers.objectives import build_objective
from tests.helpers import close, make_strong, pad, tokens

SIZES = dict(
    vocab_size=50, hidden_size=16, num_hidden_layers=2, num_attention_heads=4, intermediate_size=24,
    max_position_embeddings=32, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    position="rotary", residual="pre_ln", normalization="rms_norm",
)  # fmt: skip
DEPTH, WEIGHT = 2, 0.7


def build(cls=XFormerForMultiTokenPrediction, depth=DEPTH, **fields):
    torch.manual_seed(0)
    settings = {"multi_token_prediction": {"depth": depth, "weight": WEIGHT}}
    return make_strong(cls(XFormerConfig(**SIZES | fields, pretraining=settings)).double().eval())


def normed(norm, x):
    return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * norm.weight


@torch.no_grad()
def one_layer(model, module, vectors, states):
    """What a module makes of both [1, T, D]: it is a model of one layer."""
    one = copy.deepcopy(model.config)
    one.num_hidden_layers = 1
    joined = [normed(module.token_norm, vectors), normed(module.state_norm, states)]
    tower = XFormerModel(one).double().eval()
    weights = {f"trunk.layers.0.{name}": value for name, value in module.layer.state_dict().items()}
    weights["trunk.final_norm.weight"] = module.final_norm.weight
    missing = tower.load_state_dict(weights, strict=False)
    assert not missing.unexpected_keys and missing.missing_keys == ["trunk.embedding.tokens.weight"]
    return tower(inputs_embeds=torch.cat(joined, -1) @ module.join_proj.weight.T).last_hidden_state


@torch.no_grad()
def log_probs(model, ids):
    """By depth, of the target of each place that has one."""
    states, table, found = model.model(ids).last_hidden_state, model.get_input_embeddings().weight, []
    for k, module in enumerate(model.mtp, 1):
        left = ids.shape[1] - k
        if left < 2:  # a text without a target at this depth
            return found + [[]] * (len(model.mtp) - k + 1)
        states = one_layer(model, module, table[ids[:, k:]], states[:, :left])
        scores = torch.log_softmax(states[:, : left - 1] @ table.T, -1)
        found.append([float(scores[0, i, ids[0, i + k + 1]]) for i in range(left - 1)])
    return found


def expected_loss(model, texts):
    by_depth = zip(*[log_probs(model, text[None]) for text in texts], strict=True)
    means = [-statistics.fmean(itertools.chain(*one)) for one in by_depth]
    return torch.tensor(sum(means) * WEIGHT / DEPTH, dtype=torch.float64)


@pytest.mark.parametrize("attention", ["dense", {"type": "sliding_window", "window_size": 3, "sinks": 0}])
def test_loss_is_that_of_the_equation(attention):
    """Of one text, and of texts with padding on either side and inside, the last of which has no target."""
    model, ids = build(attention=attention), tokens(1, 9) % 50
    output = model(input_ids=ids, labels=ids)
    plain = build(XFormerForCausalLM, attention=attention)
    plain.load_state_dict(model.state_dict(), strict=False)
    first = plain(input_ids=ids, labels=ids)
    assert torch.equal(first.logits, output.logits) and first.aux_losses is None
    (extra,) = output.aux_losses.values()
    close(extra.detach(), expected_loss(model, ids), 1e-9)
    close(output.loss, first.loss + extra, 1e-12)
    texts = [tokens(length, seed=length) % 50 for length in (7, 4, 2)]
    for side in ("left", "right", "inside"):
        padded, mask = pad(texts, 9, "left" if side == "left" else "right", seed=3)
        if side == "inside":
            padded, mask = (torch.cat((x[:, :1], y[:, None].expand(-1, 2), x[:, 1:]), 1) for x, y in
                            ((padded, padded[:, -1]), (mask, mask[:, -1])))  # fmt: skip
        padded = padded % 50
        found = model(input_ids=padded, attention_mask=mask, labels=padded).aux_losses["multi_token_prediction"]
        close(found.detach(), expected_loss(model, texts), 1e-9)


def test_documents_stay_apart():
    """Packed documents have the loss of single texts; vectors in place of ids, and labels in place, change nothing."""
    model, texts = build(), [tokens(length, seed=length) % 50 for length in (6, 5)]
    row = torch.cat(texts)[None]
    given = {"position_ids": torch.cat([torch.arange(6), torch.arange(5)])[None], "labels": row}
    wanted = expected_loss(model, texts)
    for inputs in ({"input_ids": row}, {"inputs_embeds": model.get_input_embeddings()(row)}):
        close(model(**inputs, **given).aux_losses["multi_token_prediction"].detach(), wanted, 1e-9)
    model.config.labels_in_place = True
    given["labels"] = torch.cat([torch.cat((text[1:], torch.tensor([-100]))) for text in texts])[None]
    close(model(input_ids=row, **given).aux_losses["multi_token_prediction"].detach(), wanted, 1e-9)


def test_every_module_learns_and_is_left_behind(tmp_path):
    """Gradients reach all modules, with activation checkpointing as without; a checkpoint is one of a causal model,
    which writes the same."""
    model, ids = build(), tokens(2, 9) % 50
    slopes = []
    for recomputes in (False, True):
        model.train()
        model.gradient_checkpointing_enable() if recomputes else None
        model.zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()
        slopes.append([parameter.grad.clone() for parameter in model.parameters()])
    for one, other in zip(*slopes, strict=True):
        assert one.abs().sum() > 0
        close(one, other, 1e-9)
    model.gradient_checkpointing_disable()
    model.eval().save_pretrained(tmp_path)
    alone = XFormerForCausalLM.from_pretrained(tmp_path).double()
    assert not any("mtp" in name for name in alone.state_dict())
    options = {"max_new_tokens": 5, "do_sample": False}
    assert torch.equal(alone.generate(ids, **options), model.generate(ids, **options))


def test_objective_and_refusals():
    objective = build_objective({"type": "mtp", "mtp_depth": 3, "mtp_weight": 0.1})
    config = XFormerConfig(**SIZES, **objective.config_fields())
    assert len(XFormerForMultiTokenPrediction(config).mtp) == 3
    with pytest.raises(ValueError, match="mtp_depth"):
        build_objective({"type": "mtp", "mtp_depth": 0})
    for fields, message in (
        ({"attention": "cross_layer_attention"}, "attention 'cross_layer_attention' shares tensors"),
        ({"attention": "sac"}, "attention 'sac' draws choices"),
        ({"stack": "universal"}, "stack 'universal' does not run"),
        ({"embedding": {"type": "factorized", "width": 8}, "head": "factorized"}, "table of width 8"),
        ({"feedforward": "hash_layers"}, "reads inputs besides tokens"),
    ):
        with pytest.raises(ValueError, match=message):
            build(**fields)
