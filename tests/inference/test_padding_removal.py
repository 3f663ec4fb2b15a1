"""Padding removal: with `unpad_inputs` a padded batch gives what it gives without, in values and gradients."""

import pytest
import torch

from hf_xformers import XFormerConfig, XFormerForSequenceClassification, XFormerForTokenClassification
from hf_xformers.core.unpadding import Unpadding
from tests.common.cases import CASES, FLAGS, components, covering
from tests.helpers import close, close_gradients, gradients, make_strong, pad, tokens

READERS = [case for case in CASES if case.shape != "decoder"]


def allows(case):
    towers = case.preset.tower_configs()
    return all("unpadding" in spec.supports for tower in towers for spec in (tower.stack, tower.block))


def batch(side="right"):
    """A full row, half rows, a single token and a row of padding alone."""
    rows = [tokens(9), tokens(5, seed=1), tokens(1, seed=2), tokens(0)]
    if side == "both":
        ids, mask = pad(rows, 9, "right", seed=4)
        return ids.roll(2, 1), mask.roll(2, 1)
    return pad(rows, 9, side, seed=4)


def test_indices():
    """Lengths 3, 1 and 4: which of 12 places are real, and back again."""
    mask = torch.arange(4) < torch.tensor([[3], [1], [4]])
    unpadding = Unpadding(mask)
    assert unpadding.index.tolist() == [0, 1, 2, 4, 8, 9, 10, 11]
    states = torch.randn(3, 4, 2)
    packed = unpadding.pack(states)
    assert packed.shape == (1, 8, 2)
    assert torch.equal(unpadding.pad(packed), states * mask[..., None])
    positions = unpadding.pack(torch.arange(4)[None])
    assert positions.tolist() == [[0, 1, 2, 0, 0, 1, 2, 3]]


REMOVING = [case for case in READERS if allows(case)]
# Layers are given the real tokens in one row, whatever the side was; what is around them and what numbers the tokens
# sees it. So all components are padded on both sides, and a cover of those parts on one.
AROUND = ("position", "stack", "block", "embedding", "head")
ON_ONE_SIDE = covering(REMOVING, lambda case: {part[:2] for part in components(case) if part[0] in AROUND})
SIDES = [(case, "both") for case in covering(REMOVING, lambda case: {part[:2] for part in components(case)})]
SIDES += [(case, side) for case in ON_ONE_SIDE for side in ("right", "left")]


@pytest.mark.parametrize("case, side", SIDES, ids=str)
def test_equals_padded(case, side):
    """Every mechanism on the usual stack, whatever padding holds, a row of padding alone included."""
    model = case.shared()
    ids, mask = batch(side)
    real = mask.bool()[..., None]
    expected = case.run(model, ids, mask, use_cache=False)
    slopes = gradients(model, expected * real)
    towers = [module for module in model.modules() if hasattr(module, "takes_pairs")]
    seen = []
    hooks = [tower.layers[0].register_forward_pre_hook(lambda _, args: seen.append(args[0].shape)) for tower in towers]
    for tower in towers:
        tower.config.unpad_inputs = True
    try:
        output = case.run(model, ids, mask, use_cache=False)
        assert len(seen) >= len(towers)  # a layer may run at several depths
        assert set(seen) == {(1, 15, model.config.hidden_size)}, "tokens of padding reached the layers"
        close(output * real, expected * real)
        close_gradients(gradients(model, output * real), slopes)
    finally:
        for tower in towers:
            tower.config.unpad_inputs = False
        for hook in hooks:
            hook.remove()


@pytest.mark.parametrize("case", [case for case in READERS if not allows(case)], ids=str)
def test_refusals(case):
    """One sentence that names the component; also when it is switched on later."""
    with pytest.raises(ValueError, match=r"`unpad_inputs=True` joins .* does not allow: .*; leave `unpad_inputs` out"):
        case.config(unpad_inputs=True)
    model = case.build()
    for tower in (module for module in model.modules() if hasattr(module, "takes_pairs")):
        tower.config.unpad_inputs = True
    with pytest.raises(ValueError, match="leave `unpad_inputs` out"):
        case.run(model, *batch(), use_cache=False)


@pytest.mark.parametrize("kind", ["patience_exit", "entropy_exit", "token_exit"])
def test_rows_and_tokens_that_leave_early(kind):
    """They leave after the same layers with the same answers, those that stay go on as one row, and classifiers inside
    learn the same."""
    whole = kind != "token_exit"
    exits = {
        "patience_exit": {"patience": 1},
        "entropy_exit": {"threshold": 0.6},
        "token_exit": {"exit_threshold": 0.6, "exit_window": 0},
    }
    fields = {"vocab_size": 99, "hidden_size": 16, "num_hidden_layers": 4, "num_attention_heads": 2, "num_labels": 2}
    fields |= {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "intermediate_size": 32}
    config = XFormerConfig(**fields, stack={"type": kind, **exits[kind]}, **FLAGS["encoder"])
    torch.manual_seed(0)
    head = XFormerForSequenceClassification if whole else XFormerForTokenClassification
    model = make_strong(head(config), amount=0.3).double().eval()
    ids, mask = (x[:3] for x in batch())  # a row of padding alone has no answer
    real = mask.bool()
    tower = model.model.trunk
    seen = []
    tower.layers[1].register_forward_pre_hook(lambda _, args: seen.append(args[0].shape))
    labels = torch.tensor([0, 1, 1]) if whole else torch.where(real, ids % 2, -100)
    found = []
    for removes in (False, True):
        tower.config.unpad_inputs = removes
        with torch.no_grad():
            output = model(ids, mask)
        layers = output.exit_layers if whole else output.exit_layers[real]
        model.train().zero_grad()
        loss = model(ids, mask, labels=labels).loss
        loss.backward()
        slopes = {name: x.grad for name, x in model.named_parameters() if x.grad is not None}
        found.append((layers, output.logits if whole else output.logits[real], loss, slopes))
        model.eval()
    (layers, logits, loss, slopes), (other_layers, other_logits, other_loss, other_slopes) = found
    assert torch.equal(layers, other_layers) and len(layers.unique()) > 1, "nobody leaves before others"
    close(other_logits, logits)
    close(other_loss, loss)
    close_gradients(other_slopes, slopes)
    assert seen[-1] == (1, 15, 16) and seen[-2][:1] == (1,), "tokens of padding reached the layers"


def test_saving_and_recording(tmp_path):
    """The switch is a field of the config; recorded states and attention weights come from the padded path."""
    case = next(case for case in READERS if case.name == "xf_bert")
    model = case.build(unpad_inputs=True)
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path)
    assert again.config.unpad_inputs
    assert not type(model).from_pretrained(tmp_path, unpad_inputs=False).config.unpad_inputs
    ids, mask = batch()
    recorded = model(ids, mask, output_hidden_states=True, output_attentions=True)
    assert all(state.shape[:2] == ids.shape for state in recorded.hidden_states)
    real = mask.bool()
    close(model(ids, mask).logits[real], recorded.logits[real])
    close(model(ids).logits, case.shared()(ids).logits)


def test_generation_is_as_before():
    """Decoding keeps its rows, its prompt is padded as it was."""
    case = next(case for case in CASES if str(case) == "xf_gpt2-decoder")
    ids, mask = pad([tokens(5), tokens(3, seed=1)], 5, "left")
    settings = {"max_new_tokens": 4, "do_sample": False}
    expected = case.shared().generate(ids, attention_mask=mask, **settings)
    model = case.build(unpad_inputs=True)
    assert torch.equal(model.generate(ids, attention_mask=mask, **settings), expected)
    assert torch.equal(model.generate(ids, attention_mask=mask, use_cache=False, **settings), expected)


@pytest.mark.parametrize("feedforward", ["switch", "product_key", "swiglu"])
def test_other_feed_forwards(feedforward):
    """Those that do not read single tokens alone are given rows."""
    names = {"switch": "switch_transformer", "product_key": "product_key_memory"}
    torch.manual_seed(0)
    fields = {"vocab_size": 99, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    fields |= {"intermediate_size": 32, "feedforward": names.get(feedforward, feedforward), **FLAGS["encoder"]}
    from hf_xformers import XFormerModel

    model = XFormerModel(XFormerConfig(**fields)).double().eval()
    ids, mask = batch()
    real = mask.bool()
    expected = model(ids, mask).last_hidden_state[real]
    model.trunk.config.unpad_inputs = True
    close(model(ids, mask).last_hidden_state[real], expected)
