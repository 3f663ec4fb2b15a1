"""Numbers that are multiplied by positions, or followed along a text, stay in float32 in models of half precision."""

import copy

import pytest
import torch

from hf_xformers import XFormerConfig, XFormerForMaskedLM, XFormerModel
from hf_xformers.core.precision import float32_names
from tests.helpers import make_strong, tokens

SIZES = dict(
    vocab_size=50,
    hidden_size=16,
    num_hidden_layers=2,
    num_attention_heads=4,
    intermediate_size=24,
    max_position_embeddings=512,
)
KEPT = {
    "floater": {"position": "floater"},
    "learnable_sinusoidal": {"position": "learnable_sinusoidal"},
    "learnable_sinusoidal_relative": {"position": "learnable_sinusoidal_relative"},
    "complex_order": {"embedding": "complex_order", "position": "none", "tie_word_embeddings": False},
}
LIMITS = {torch.bfloat16: 0.02, torch.float16: 0.003}  # of the norm; what rounding leaves of two layers


def build(name, model_class=XFormerModel):
    torch.manual_seed(0)
    return make_strong(model_class(XFormerConfig(**SIZES, **KEPT[name])).eval(), amount=0.02)


def test_counters_stay_integers(tmp_path):
    model = XFormerModel(XFormerConfig(**SIZES, attention="sac", position="none"))
    model.choice_loss.passes.fill_(2**24 + 1)
    model.save_pretrained(tmp_path)
    assert XFormerModel.from_pretrained(tmp_path, dtype=torch.bfloat16).choice_loss.passes.item() == 2**24 + 1


@pytest.mark.parametrize("dtype", LIMITS)
@pytest.mark.parametrize("name", KEPT)
def test_half_precision(name, dtype, tmp_path):
    model, ids = build(name), tokens(1, 500, high=50)
    model.save_pretrained(tmp_path)
    loaded = XFormerModel.from_pretrained(tmp_path, dtype=dtype).eval()
    loaded.save_pretrained(tmp_path / "again")
    ways = {
        "to": copy.deepcopy(model).to(dtype),
        "loaded": loaded,
        "again": XFormerModel.from_pretrained(tmp_path / "again").eval(),
    }
    with torch.no_grad():
        expected = model(ids).last_hidden_state
        for way, cast in ways.items():
            kept = float32_names(cast)
            types = {parameter: value.dtype for parameter, value in cast.named_parameters()}
            assert kept and all(types[each] == (torch.float32 if each in kept else dtype) for each in types), way
            assert cast.dtype == dtype
            found = cast(ids).last_hidden_state
            assert found.dtype == dtype
            error = (found.float() - expected).norm() / expected.norm()
            assert error < LIMITS[dtype], f"{way}: {error:.4f}"


@pytest.mark.parametrize("name", KEPT)
def test_under_a_head_and_autocast(name, tmp_path):
    build(name).save_pretrained(tmp_path)
    model = XFormerForMaskedLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert all(
        value.dtype == torch.float32 for each, value in model.named_parameters() if each in float32_names(model)
    )
    ids = tokens(2, 40, high=50)
    model(ids, labels=ids).loss.backward()
    precise = build(name)
    with torch.no_grad():
        expected = precise(ids).last_hidden_state
        with torch.autocast("cpu", torch.bfloat16):
            found = precise(ids).last_hidden_state
    assert (found.float() - expected).norm() / expected.norm() < 0.02


def test_float64_and_devices():
    module = build("floater").trunk.position
    assert module.double().start.dtype == torch.float64
    assert module.half().start.dtype == torch.float32
    assert module.to("meta").start.dtype == torch.float32


def test_floater_sees_writes_through_data():
    module = build("floater").trunk.position
    with torch.no_grad():
        before = module.biases(40)
        module.start.data.mul_(2.0)
        assert (module.biases(40)[0] - 2 * before[0]).abs().max() < 1e-6
        assert module.biases(40).data_ptr() == module.biases(30).data_ptr()  # what is unchanged is solved once


def test_floater_built_for_inference():
    with torch.inference_mode():
        model = build("floater")
        assert model(tokens(1, 9, high=50)).last_hidden_state.isfinite().all()
