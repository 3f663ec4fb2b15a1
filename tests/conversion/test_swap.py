"""Other components for trained models: what is kept and derived, equality where a mechanism has it, and refusals."""

from __future__ import annotations

import json
import re

import pytest
import torch
import transformers
from transformers import AutoModelForMaskedLM, AutoTokenizer

import hf_xformers
from hf_xformers.conversion import from_transformers, swap_checkpoint, swap_components
from hf_xformers.core import components
from tests.conversion.architectures import tiny
from tests.conversion.test_checkpoints import WORD_PIECES, files
from tests.forks import forks

# (case, components that equal dense attention as long as the text is inside the window)
WIDE = [
    ("longformer", {"attention_window": 64}),
    ("band_attention", {"window_size": 64}),
    ("bigbird", {}),
]


def outputs(model, given):
    with torch.no_grad():
        return model(**given).logits


def swapped(source, **changes):
    model, report = swap_components(source, **changes)
    names = set(model.state_dict())
    told = [*report.kept, *(name for _, name, _ in report.derived), *report.new]
    assert sorted(told) == sorted(set(told)), "a tensor is told twice"
    tied = {"lm_head.decoder.weight", "decoder.embedding.tokens.weight", "model.decoder.embedding.tokens.weight"}
    assert names - tied <= set(told) <= names
    return model, report


ENCODERS = (
    *("RobertaForMaskedLM", "BertForSequenceClassification"),
    *("RoFormerForMaskedLM", "DebertaV2ForMaskedLM"),
)


@pytest.fixture(params=ENCODERS)
def encoder(request):
    return tiny(request.param)


# ---------------------------------------------------------------------------------------------------- equality


@pytest.mark.parametrize("name, fields", WIDE, ids=[name for name, _ in WIDE])
def test_wide_windows_equal_the_source(encoder, name, fields):
    source, given = encoder.make(), encoder.given()
    model, report = swapped(source, attention={"type": name, **fields}, measure=False)
    assert type(model).__name__.startswith("XFormerFor") and model.config.attention.type == name
    mask = given["attention_mask"].bool() if "MaskedLM" in encoder.head else slice(None)
    torch.testing.assert_close(outputs(model, given)[mask], outputs(source, given)[mask], atol=1e-5, rtol=0)
    assert not report.dropped and not report.new


@pytest.mark.parametrize("name", ["GPT2LMHeadModel", "BartForConditionalGeneration", "T5ForConditionalGeneration"])
def test_decoders_and_two_towers(name):
    case = tiny(name)
    source, given = case.make(), case.given()
    changes = {"attention": {"type": "band_attention", "window_size": 64}}
    model, report = swapped(source, **changes, measure=False)
    mask = given.get("decoder_attention_mask", given["attention_mask"]).bool()
    torch.testing.assert_close(outputs(model, given)[mask], outputs(source, given)[mask], atol=2e-5, rtol=0)
    assert not report.dropped and not report.new and not report.derived
    if "decoder_input_ids" in given:  # one tower alone
        model, _ = swapped(source, **changes, decoder={"attention": "dense"}, measure=False)
        assert model.config.tower("decoder").attention.type == "dense"
        assert model.config.tower("trunk").attention.type == "band_attention"
        # T5 has no biases and does not scale scores: what components share, they keep
        assert model.config.attention.bias == from_transformers(source).config.attention.bias
        torch.testing.assert_close(outputs(model, given)[mask], outputs(source, given)[mask], atol=2e-5, rtol=0)


@pytest.mark.parametrize("name, fields", WIDE, ids=[name for name, _ in WIDE])
def test_an_encoder_with_a_score_bias(name, fields):
    """A long-context T5: the encoder reads windows and global tokens, with the bias that it had."""
    case = tiny("T5ForConditionalGeneration")
    source, given, dense = case.make(), case.given(), {"attention": "dense"}
    model, report = swapped(source, attention={"type": name, **fields}, decoder=dense, measure=False)
    mask = given["decoder_attention_mask"].bool()
    torch.testing.assert_close(outputs(model, given)[mask], outputs(source, given)[mask], atol=2e-5, rtol=0)
    assert not report.dropped and not report.new


def test_mixing_heads_and_gates_start_as_the_source():
    case = tiny("BertForMaskedLM")
    source, given = case.make(), case.given()
    model, report = swapped(source, attention="talking_heads", feedforward="geglu", measure=False)
    mask = given["attention_mask"].bool()
    torch.testing.assert_close(outputs(model, given)[mask], outputs(source, given)[mask], atol=1e-5, rtol=0)
    assert len(report.derived) == 2 * (2 + 4) and not report.new
    back, _ = swapped(model, feedforward={"type": "gelu", "approximate": "none"}, measure=False)
    torch.testing.assert_close(outputs(back, given)[mask], outputs(source, given)[mask], atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", [name for name in components.names("attention") if name != "memory_vector"])
def test_every_mechanism_can_be_swapped_in(name):
    """What the sources have is kept where the mechanism has it, too, and the result works."""
    spec = components.SLOTS["attention"].get(name)
    case = tiny("BertForMaskedLM" if spec.bidirectional else "GPT2LMHeadModel")
    source = from_transformers(case.make())
    try:
        model, report = swapped(source, attention=name, measure=False)
    except ValueError as refusal:  # a mechanism that needs a stack or a block of its own says which
        slot, needed = re.search(r"set `(stack|block)='(\w+)'`", str(refusal)).groups()
        model, report = swapped(source, attention=name, **{slot: needed}, measure=False)
    given = {**case.given(), "labels": case.given()["input_ids"]}
    output = model.train()(**given)
    output.loss.backward()
    assert output.loss.isfinite()
    before, after = source.state_dict(), model.state_dict()
    outside = [key for key in before if ".attention." not in key]
    assert all(torch.equal(before[key], after[key]) for key in outside) and set(outside) <= {*report.kept, *after}
    kept = [key for key in report.kept if ".attention." in key]
    assert all(torch.equal(before[key], after[key]) for key in kept)
    derived = {name for _, name, _ in report.derived}
    same = {key for key in before if key in after and before[key].shape == after[key].shape}
    assert set(kept) == {key for key in same - derived if ".attention." in key}
    rooms = (".attention.", ".stack.", ".choice_loss.")
    assert not [key for key in report.new if not any(room in key for room in rooms)]


# ---------------------------------------------------------------------------------------------------- derivations


@pytest.mark.parametrize(
    "name", ["BertForMaskedLM", "RobertaForMaskedLM", "BartForConditionalGeneration", "MPNetForMaskedLM"]
)
def test_learned_positions_are_tiled(name):
    source = from_transformers(tiny(name).make())
    model, report = swapped(source, max_length=53, measure=False)
    assert type(model) is type(source) and model.config.max_position_embeddings == 53
    spec, table, rows = source.config.position, "model.trunk.position.table", source.config.max_position_embeddings
    if spec.type == "combined":
        spec, table = spec.parts[0], "model.trunk.position.parts.0.table"
    old, new = (m.state_dict()[f"{table}.weight"] for m in (source, model))
    assert torch.equal(new[: spec.offset], old[: spec.offset])
    for place in (0, 23, 24, 30, 47, 48, 52):
        assert torch.equal(new[spec.offset + place], old[spec.offset + place % rows])
    assert len(report.derived) == (2 if source.config.is_encoder_decoder else 1) and not report.dropped
    short, _ = swapped(model, max_length=10, measure=False)
    assert torch.equal(short.state_dict()[f"{table}.weight"], old[: spec.offset + 10])


@pytest.mark.parametrize("heads", [1, 2])
def test_grouped_heads_are_means(heads):
    source = from_transformers(tiny("BertForMaskedLM").make())
    model, report = swapped(source, num_key_value_heads=heads, measure=False)
    width, group = 8, 4 // heads
    for letter in "kv":
        old, new = (m.model.trunk.layers[1].attention for m in (source, model))
        for part in ("weight", "bias"):
            before = getattr(getattr(old, f"{letter}_proj"), part).double()
            after = getattr(getattr(new, f"{letter}_proj"), part)
            for head in range(heads):
                members = [before[(head * group + i) * width : (head * group + i + 1) * width] for i in range(group)]
                expected = sum(members) / group
                torch.testing.assert_close(after[head * width : (head + 1) * width].double(), expected)
    assert len(report.derived) == 2 * 4
    # copies for each head compute what one shared head does
    given = tiny("BertForMaskedLM").given()
    many, _ = swapped(model, num_key_value_heads=None, measure=False)
    torch.testing.assert_close(outputs(many, given), outputs(model, given), atol=1e-5, rtol=0)


def test_global_projections_are_copies_of_the_derived_ones():
    source = from_transformers(tiny("BertForMaskedLM").make())
    model, report = swapped(source, attention="longformer", num_key_value_heads=2, measure=False)
    for layer in model.model.trunk.layers:
        for letter in "qkv":
            local, own = (getattr(layer.attention, f"{letter}{kind}_proj") for kind in ("", "_global"))
            assert torch.equal(local.weight, own.weight) and torch.equal(local.bias, own.bias)
            assert local.weight.data_ptr() != own.weight.data_ptr()
    assert "model.trunk.layers.0.attention.k_global_proj.weight" in [name for _, name, _ in report.derived]


def test_experts_are_copies():
    source = from_transformers(tiny("BertForMaskedLM").make())
    changes = {"type": "switch_transformer", "num_experts": 3, "every": 1}
    model, report = swapped(source, feedforward=changes, measure=False)
    experts, dense = model.model.trunk.layers[1].feedforward.experts, source.model.trunk.layers[1].feedforward
    for index in range(3):
        assert torch.equal(experts.up_proj[index], dense.up_proj.weight)
        assert torch.equal(experts.down_bias[index], dense.down_proj.bias)
    assert all("router" in name for name in report.new) and len(report.new) == 2


def test_gated_experts_are_copies_whose_sum_is_the_network():
    torch.manual_seed(0)
    config = hf_xformers.XFormerConfig(
        vocab_size=40, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=24,
        feedforward="swiglu",
    )  # fmt: skip
    source, ids = hf_xformers.XFormerForCausalLM(config).eval(), torch.arange(9)[None]
    with torch.no_grad():
        for parameter in source.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    changes = {"type": "deepseek_moe", "num_experts": 4, "bias": True}
    model, report = swapped(source, feedforward=changes, measure=False)
    torch.testing.assert_close(model(ids).logits, source(ids).logits, atol=1e-5, rtol=0)
    assert all("router" in name or "balance" in name for name in report.new)


def test_sinusoids_become_a_table():
    torch.manual_seed(0)
    config = hf_xformers.XFormerConfig(
        vocab_size=40, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=24,
        max_position_embeddings=20, position="sinusoidal_absolute",
    )  # fmt: skip
    source = hf_xformers.XFormerForMaskedLM(config).eval()
    model, _ = swapped(source, position="learned_absolute", measure=False)
    ids = torch.randint(5, 40, (2, 17))
    torch.testing.assert_close(model(ids).logits, source(ids).logits, atol=1e-5, rtol=0)
    assert model.config.position.type == "learned_absolute"


def test_distance_buckets():
    source = from_transformers(tiny("T5ForConditionalGeneration").make())
    changes = {"num_buckets": 12, "max_distance": 20}
    model, report = swapped(source, position=changes, measure=False)
    place = torch.arange(24)
    for tower in ("trunk", "decoder"):
        old, new = (getattr(m.model, tower).position for m in (source, model))
        before, after = old.block(place, place), new.block(place, place)
        offsets = place[None] - place[:, None]
        exact = (offsets.abs() < 2) if tower == "trunk" else ((offsets <= 0) & (offsets > -4))
        torch.testing.assert_close(after[:, exact], before[:, exact], atol=1e-6, rtol=0)
    assert len(report.derived) == 2
    table = swapped(source.double(), position=changes, measure=False)[0].model.trunk.position.table.weight
    assert not torch.equal(table.float().double(), table)


def test_norms_follow_the_states():
    source = from_transformers(tiny("BertForMaskedLM").make())
    model, report = swapped(source, residual="pre_ln", measure=False)
    old, new = source.model.trunk, model.model.trunk
    assert torch.equal(new.layers[0].feedforward_residual.norm.weight, old.layers[0].attention_residual.norm.weight)
    assert torch.equal(new.layers[1].attention_residual.norm.bias, old.layers[0].feedforward_residual.norm.bias)
    assert torch.equal(new.final_norm.weight, old.layers[1].feedforward_residual.norm.weight)
    assert [name.split("trunk.")[1] for name in report.new] == [
        f"layers.0.attention_residual.norm.{part}" for part in ("bias", "weight")
    ]
    back, report = swapped(model, residual="post_ln", measure=False)
    given = tiny("BertForMaskedLM").given()
    mask = given["attention_mask"].bool()
    torch.testing.assert_close(outputs(back, given)[mask], outputs(source, given)[mask], atol=1e-5, rtol=0)


# ---------------------------------------------------------------------------------------------------- the report


def test_new_and_dropped_tensors():
    source = tiny("BertForMaskedLM").make()
    model, report = swapped(source, attention="synthesizer", position="sinusoidal_absolute")
    layer = "model.trunk.layers.0.attention."
    assert f"{layer}v_proj.weight" in report.kept and f"{layer}q_proj.weight" in report.dropped
    assert any(name.startswith(layer) for name in report.new)
    assert "model.trunk.position.table.weight" in report.dropped
    assert report.movement.kl_mean > 0 and report.movement.predictions > 0
    json.dumps(report.to_dict())
    text = report.summary()
    assert "attention: dense -> synthesizer" in text and "dropped: attention.q_proj.weight, 2 tensors" in text
    assert "  dropped: model.trunk.position.table.weight, 1 tensor" in text.splitlines()
    again, _ = swapped(source, attention="synthesizer", position="sinusoidal_absolute", measure=False)
    other, _ = swapped(source, attention="synthesizer", position="sinusoidal_absolute", measure=False, seed=1)
    new = report.new[0]
    assert torch.equal(model.state_dict()[new], again.state_dict()[new])
    assert any(not torch.equal(again.state_dict()[name], other.state_dict()[name]) for name in report.new)


def test_the_source_stays_as_it_is():
    """In tensors and in training, where its dropout has no say in the movement."""
    source = from_transformers(tiny("BertForMaskedLM").make()).train()
    source.model.trunk.embedding.eval()
    before = {name: tensor.clone() for name, tensor in source.state_dict().items()}
    model, report = swapped(source, attention={"type": "longformer", "attention_window": 64})
    assert report.movement.kl_max < 1e-5
    assert source.training and source.model.trunk.layers.training and not source.model.trunk.embedding.training
    with torch.no_grad():
        for tensor in model.parameters():
            tensor.fill_(7.0)
    assert all(torch.equal(before[name], tensor) for name, tensor in source.state_dict().items())


def test_movement_is_the_divergence_of_the_predictions():
    source = from_transformers(tiny("GPT2LMHeadModel").make())
    model, report = swapped(source, attention={"type": "band_attention", "window_size": 2})
    found = report.movement
    assert found.text == "random tokens" and found.length == 24 and found.predictions == found.rows * 24
    ids = torch.randint(5, 60, (512 // 24 * 24,), generator=torch.Generator().manual_seed(0)).view(-1, 24)
    p, q = (outputs(m.double(), {"input_ids": ids}).softmax(-1) for m in (source, model))
    divergence = (p * (p / q).log()).sum(-1)
    assert found.kl_mean == pytest.approx(float(divergence.mean()), rel=1e-3)
    assert found.kl_max == pytest.approx(float(divergence.max()), rel=1e-3)
    assert found.agreement == pytest.approx(float((p.argmax(-1) == q.argmax(-1)).double().mean()), abs=1e-2)
    bare = from_transformers(tiny("BertModel").make())
    _, report = swapped(bare, attention={"type": "band", "window_size": 1})
    assert report.movement.kl_mean is None and report.movement.states > 0
    assert "hidden states moved" in report.summary()


# ---------------------------------------------------------------------------------------------------- folders


@pytest.fixture
def bert(tmp_path):
    folder = tmp_path / "bert"
    tiny("BertForMaskedLM").make().save_pretrained(folder)
    transformers.BertTokenizer(vocab={piece: i for i, piece in enumerate(WORD_PIECES)}).save_pretrained(folder)
    return folder


def test_folders(tmp_path, bert):
    before = files(bert)
    changes = {"type": "longformer", "window": 80}  # a word that means one field only
    report = swap_checkpoint(bert, tmp_path / "long", attention=changes, max_length=96)
    assert report.movement.text == "Python's help texts" and report.movement.kl_max < 1e-5
    assert report.conversion.source == "BertForMaskedLM" and not report.new
    model = AutoModelForMaskedLM.from_pretrained(tmp_path / "long")
    assert type(model) is hf_xformers.XFormerForMaskedLM and model.config.attention.attention_window == 80
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "long")
    assert tokenizer.model_max_length == 96
    batch = tokenizer("abc " * 20, return_tensors="pt")
    assert batch["input_ids"].shape[1] > 24 and outputs(model, batch).isfinite().all()
    assert files(bert) == before
    told = [swap_components(bert, max_length=30, texts=sample)[1].movement for sample in ("abc de f", ["abc de f"])]
    assert told[0] == told[1] and told[0].text == "the text given"
    # and on from there, from a checkpoint of this package
    again = swap_checkpoint(tmp_path / "long", tmp_path / "short", attention={"attention_window": 4})
    assert again.conversion is None and again.movement.kl_mean > 0 and not again.new and not again.dropped
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bert", "long", "short"]  # no scratch left


FRESH = """
from hf_xformers.conversion import swap_components
from hf_xformers.variants import config_class, family

sizes = {"vocab_size": 9, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
model = family("bert")["ForMaskedLM"](config_class("bert")(**sizes))
print(type(swap_components(model, attention="band_attention", measure=False)[0]).__name__)
"""


def test_a_process_that_knows_one_family_makes_a_free_mix():
    done = forks().run(FRESH)
    assert done.stdout.split() == ["XFormerForMaskedLM"], done.stderr


def test_a_failed_save_leaves_the_target(tmp_path, bert, monkeypatch):
    target = tmp_path / "target"
    swap_checkpoint(bert, target, max_length=30)
    before = files(tmp_path)

    def full(model, folder):
        raise OSError("disk full")

    monkeypatch.setattr(hf_xformers.conversion.swap, "save", full)
    with pytest.raises(OSError, match="disk full"):
        swap_checkpoint(bert, target, max_length=40, overwrite=True)
    assert files(tmp_path) == before


# ---------------------------------------------------------------------------------------------------- refusals

REFUSED = {
    "nothing": ({}, "Nothing to swap; give a component"),
    "unknown": ({"atention": "dense"}, "nothing called 'atention' to swap.*Did you mean 'attention'"),
    "geometry": ({"hidden_size": 64}, "`hidden_size` cannot change in a swap.*What can: components"),
    "by another name": ({"max_position_embeddings": 64}, "as `max_length`"),
    "length": ({"max_length": 0}, "`max_length` must be at least 1 token, got 0"),
    "component": ({"attention": "dens"}, "Unknown attention component 'dens'.*Did you mean 'dense'"),
    "field": ({"attention": {"type": "longformer", "wind": 3}}, "Unknown field 'wind' of attention 'longformer'"),
    "type": ({"attention": 3}, "must be a name, a dict or a spec, got int: 3"),
    "heads": ({"num_key_value_heads": 3}, "`num_key_value_heads` 3 must divide `num_attention_heads` 4"),
    "decoder": ({"decoder": {"attention": "dense"}}, "does not have; leave it out"),
    "combination": ({"attention": "synthesizer", "position": "t5_relative_bias"}, "has no place for"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals(name):
    changes, message = REFUSED[name]
    source = from_transformers(tiny("BertForMaskedLM").make())
    with pytest.raises((ValueError, TypeError), match=f"(?s){message}"):
        swap_components(source, **changes)


def test_refused_sources():
    with pytest.raises(TypeError, match="a folder or a Hub id, got int: 3"):
        swap_components(3, max_length=5)
    model = from_transformers(tiny("BertForMaskedLM").make())
    with pytest.raises(ValueError, match="leave `head` out"):
        swap_components(model, head="Model", max_length=5)


# ---------------------------------------------------------------------------------------------------- single layers


def kinds(model):
    return [model.config.layer(index).attention.type for index in range(model.config.num_hidden_layers)]


def test_chosen_layers_change_alone():
    source = from_transformers(tiny("BertForMaskedLM").make(num_hidden_layers=5))
    wide = {"type": "longformer", "attention_window": 64}
    model, _ = swapped(source, attention=wide, layers={"attention": "0-1,4"}, measure=False)
    assert kinds(model) == ["longformer", "longformer", "dense", "dense", "longformer"]
    given = tiny("BertForMaskedLM").given()
    mask = given["attention_mask"].bool()
    assert float((outputs(model, given) - outputs(source, given))[mask].abs().max()) < 1e-5
    again, _ = swapped(model, attention="performer", layers={"attention": [2]}, measure=False)
    assert kinds(again) == ["longformer", "longformer", "performer", "dense", "longformer"]
    assert again.config.layer(0).attention == model.config.layer(0).attention
    with pytest.raises(ValueError, match="'attention' of their own: 0, 1, 4"):
        swap_components(model, attention="performer", measure=False)
    whole, _ = swapped(model, attention="performer", layers={"attention": "all"}, measure=False)
    assert kinds(whole) == ["performer"] * 5 and not whole.config.is_heterogeneous


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ({"attention": "0-5"}, "Layers '0-5' do not exist: the model has 2"),
        ({"attention": "first"}, "numbers and ranges such as"),
        ({"attention": "1-0,1"}, "numbers and ranges such as .* got '1-0,1'"),
        ({"position": "0"}, "All layers have one 'position'"),
        ({"feedforward": "0"}, "chosen for 'feedforward', which does not change"),
    ],
)
def test_refused_layers(layers, message):
    source = from_transformers(tiny("BertForMaskedLM").make())
    with pytest.raises(ValueError, match=message):
        swap_components(source, attention="performer", layers=layers, measure=False)
