"""Bidirectional language modelling: each direction is a causal model, whatever stands in the other one."""

import pytest
import torch

from hf_xformers import (
    XFGPTConfig,
    XFGPTForBidirectionalLM,
    XFGPTForCausalLM,
    XFormerConfig,
    XFormerForBidirectionalLM,
    XFormerModel,
)
from hf_xformers.core.losses import direction_targets
from hf_xformers.modeling.bidirectional_lm import mirror_places
from hf_xformers.objectives import build_objective
from hf_xformers.training.building import build_config, check_objective
from hf_xformers.variants import config_class
from tests.helpers import NO_DROPOUT, close, make_strong, pad, tokens

SIZES = dict(vocab_size=99, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=24)
NONE = -100


def build(cls=XFGPTForBidirectionalLM, config=XFGPTConfig, **fields):
    torch.manual_seed(0)
    made = config(**{**SIZES, **NO_DROPOUT, "max_position_embeddings": 32, **fields})
    return make_strong(cls(made), amount=0.4).double().eval()


def twin(model, direction):
    """A causal model of its own with the weights of one direction."""
    weights = {name: value for name, value in model.state_dict().items() if name.startswith(("model.", "lm_head."))}
    if direction == "backward":
        weights |= {
            name[9:]: value for name, value in model.state_dict().items() if name.startswith("backward_model.")
        }
    made = XFGPTForCausalLM(model.config).double().eval()
    made.load_state_dict(weights)
    return made


def test_reversal_keeps_padding_where_it_is():
    real = torch.tensor([[1, 1, 1, 0], [0, 1, 1, 1], [0, 0, 0, 0], [1, 0, 1, 1]]).bool()
    places = mirror_places(real)
    assert places.tolist() == [[2, 1, 0, 3], [0, 3, 2, 1], [0, 1, 2, 3], [3, 2, 1, 0]]
    assert torch.equal(places.gather(1, places), torch.arange(4).expand(4, -1))
    assert mirror_places(torch.ones(1, 1).bool()).tolist() == [[0]]


@pytest.mark.parametrize("side", ["right", "left"])
def test_golden_batches(gpt_tokenizer, side):
    """The first token has no previous one, the last no next one, and padding is not the end of a text."""
    gpt_tokenizer.padding_side = side
    try:
        batch = build_objective("elmo").collator(gpt_tokenizer)([{"input_ids": [5, 6, 0]}, {"input_ids": [7]}])
        alone = [NONE, NONE]
        assert batch["labels"][0].tolist() == [[6, NONE], [0, 5], [NONE, 6]]
        assert batch["labels"][1].tolist() == [alone] * 3
        assert set(batch) == {"input_ids", "attention_mask", "labels"}
        ids = torch.where(batch["attention_mask"].bool(), batch["input_ids"], NONE)
        assert torch.equal(direction_targets(ids, batch["attention_mask"].bool()), batch["labels"])
        # A token that is no target is read all the same.
        some = direction_targets(torch.tensor([[NONE, 6, 7]]), torch.ones(1, 3).bool())
        assert some.tolist() == [[[6, NONE], [7, NONE], [NONE, 6]]]
        with pytest.raises(ValueError, match="rows bring 'position_ids'"):
            build_objective("bilm").collator(gpt_tokenizer)([{"input_ids": [5, 6], "position_ids": [0, 0]}])
    finally:
        gpt_tokenizer.padding_side = "right"


@pytest.mark.parametrize("side", ["right", "left"])
def test_each_direction_is_a_causal_model(side):
    """Logits, loss and features against two models of their own, the second one on the reversed texts."""
    model, rows = build(), [tokens(size, seed=size) for size in (7, 4, 1)]
    forward, backward = twin(model, "forward"), twin(model, "backward")
    ids, mask = pad(rows, 9, side, seed=5)
    total, count = 0.0, 0
    with torch.no_grad():
        output = model(input_ids=ids, attention_mask=mask, labels=ids)
        for index, row in enumerate(rows):
            ahead, behind = forward(row[None]).logits[0], backward(row.flip(0)[None]).logits[0].flip(0)
            real = mask[index].bool()
            close(output.logits[index][real], torch.stack([ahead, behind], dim=1))
            states = [forward.model(row[None]).last_hidden_state[0]]
            states.append(backward.model(row.flip(0)[None]).last_hidden_state[0].flip(0))
            close(output.features[index][real], torch.cat(states, dim=-1))
            for place in range(len(row)):
                if place + 1 < len(row):
                    total, count = total - ahead[place].log_softmax(-1)[row[place + 1]], count + 1
                if place:
                    total, count = total - behind[place].log_softmax(-1)[row[place - 1]], count + 1
    assert int((output.targets != NONE).sum()) == count == 2 * (6 + 3)
    close(output.loss, total / count)
    with torch.no_grad():
        parts = [
            model(ids[i:j], mask[i:j], labels=output.targets[i:j], num_items_in_batch=count)
            for i, j in ((0, 1), (1, 3))
        ]
        close(sum(part.loss for part in parts), output.loss)
        close(model(ids, mask, labels=ids, num_items_in_batch=ids.numel()).loss, output.loss)  # as Trainer counts
        nothing = model(ids, torch.zeros_like(mask), labels=ids)
    assert nothing.loss == 0 and nothing.logits.isfinite().all()


@torch.no_grad()
def test_reversal_is_an_anticausal_mask():
    """Without positions, reading the reversed text from the left is reading the text under the mask j >= i."""
    model, ids = build(XFormerForBidirectionalLM, XFormerConfig, position="none"), tokens(2, 8)
    config = XFormerConfig(**{**model.config.to_dict(), "stack": "mask_modes", "is_decoder": False})
    encoder = XFormerModel(config, add_pooling_layer=False).double().eval()
    encoder.load_state_dict(model.backward_model.state_dict())
    right_to_left = encoder(input_ids=ids, mask_modes=torch.tensor([[2, 0]] * 2)).last_hidden_state
    close(model(input_ids=ids).features[..., 16:], right_to_left)


def both_ways(model, ids):
    """[f^j ; g^j] of the embedding and of all layers."""
    forth = model(input_ids=ids, output_hidden_states=True).hidden_states
    back = model.backward_model(input_ids=ids.flip(1), output_hidden_states=True).hidden_states
    return [torch.cat([ahead, behind.flip(1)], dim=-1) for ahead, behind in zip(forth, back, strict=True)]


@pytest.mark.parametrize("stack", ["plain", "universal"])
def test_scalar_mix(stack):
    """gamma sum_j softmax(s)_j [f^j ; g^j], of the embedding and all layers; it starts as their mean."""
    mixed = {"bidirectional_lm": {"mix": "scalar"}}
    model, ids = build(XFormerForBidirectionalLM, XFormerConfig, pretraining=mixed, stack=stack), tokens(2, 5)
    plain = model(input_ids=ids)
    assert plain.hidden_states is None
    states = both_ways(model, ids)
    shares = model.mix.weights.exp() / model.mix.weights.exp().sum()
    expected = sum(share.item() * state for share, state in zip(shares, states, strict=True))
    close(plain.features, model.mix.scale.item() * expected)
    fresh = XFormerForBidirectionalLM(model.config).eval()
    output = fresh(input_ids=ids, labels=ids)
    close(output.features, torch.stack(both_ways(fresh, ids)).mean(0), 1e-5)
    output.loss.backward()
    assert float(fresh.mix.weights.grad.abs().sum()) == 0  # a task that reads the features teaches it
    assert {"mix.weights", "mix.scale"} <= fresh.no_weight_decay()


def test_what_the_directions_share(tmp_path):
    """By default one embedding and one output, also after loading and resizing; each can be two."""
    model = build().float()
    table = model.get_input_embeddings()
    assert model.backward_model.trunk.embedding.tokens.weight is table.weight is model.lm_head.decoder.weight
    sizes = {name: sum(p.numel() for p in part.parameters()) for name, part in model.named_children()}
    assert model.num_parameters() == sizes["model"] + sizes["backward_model"] - table.weight.numel()
    model.save_pretrained(tmp_path)
    again = XFGPTForBidirectionalLM.from_pretrained(tmp_path)
    assert again.backward_model.trunk.embedding.tokens.weight is again.lm_head.decoder.weight
    ids = tokens(1, 6)
    assert torch.equal(again(input_ids=ids).logits, model(input_ids=ids).logits)
    again.resize_token_embeddings(110)
    assert again.backward_model.trunk.embedding.tokens.weight is again.lm_head.decoder.weight
    assert again.backward_model.get_input_embeddings().num_embeddings == 110
    assert again(input_ids=torch.full((1, 6), 105)).logits.shape == (1, 6, 2, 110)
    # The direction from the beginning is a model of its own.
    assert torch.equal(XFGPTForCausalLM.from_pretrained(tmp_path)(ids).logits, model(input_ids=ids).logits[:, :, 0])
    apart = build(pretraining={"bidirectional_lm": {"share_embedding": False, "share_softmax": False}})
    tables = {id(apart.model.trunk.embedding.tokens.weight), id(apart.backward_model.trunk.embedding.tokens.weight)}
    assert len(tables) == 2 and id(apart.backward_head.decoder.weight) in tables
    assert apart.backward_head.decoder.weight is not apart.lm_head.decoder.weight
    apart.save_pretrained(tmp_path / "apart")
    loaded = XFGPTForBidirectionalLM.from_pretrained(tmp_path / "apart").double()
    close(loaded(input_ids=ids).logits, apart(input_ids=ids).logits)
    with pytest.raises(ValueError, match="each direction has a softmax of its own"):
        apart.resize_token_embeddings(110)
    untied = build(tie_word_embeddings=False)
    assert untied.backward_model.trunk.embedding.tokens.weight is untied.get_input_embeddings().weight
    assert untied.lm_head.decoder.weight is not untied.get_input_embeddings().weight


def test_refusals():
    model, ids = build(), tokens(1, 6)
    with pytest.raises(TypeError, match="writes nothing"):
        model.generate(ids)
    for given, message in (
        ({"position_ids": torch.arange(6)[None]}, "`position_ids` was given"),
        ({"attention_mask": torch.ones(1, 1, 6, 6)}, r"must be \[batch, length\] = \[1, 6\]"),
        ({"labels": ids[:, :3]}, r"`labels` must be \[batch, length\] = \[1, 6\]"),
    ):
        with pytest.raises(ValueError, match=message):
            model(input_ids=ids, **given)
    for fields, message in (
        (
            {"stack": "segment_recurrent", "attention": "transformer_xl", "position": "none"},
            "reads `segment_memory`, which belongs to one order",
        ),
        ({"embedding": "adaptive", "head": "adaptive"}, "set `embedding='token'`"),
        ({"attention": "linformer"}, "attention 'linformer'"),
    ):
        with pytest.raises(ValueError, match=message):
            build(XFormerForBidirectionalLM, XFormerConfig, **fields)
    with pytest.raises(ValueError, match="needs a ForBidirectionalLM class.*another variant: .*xf_gpt"):
        check_objective(config_class("xf_bert"), "bidirectional_lm")
    chosen = build_objective({"type": "bidirectional_lm", "share_softmax": False, "mix": "scalar"})
    config = build_config(config_class("xf_gpt"), "tiny", chosen)
    settings = config.pretraining["bidirectional_lm"]
    assert config.is_decoder and not settings.share_softmax and settings.mix == "scalar"
