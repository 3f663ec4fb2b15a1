"""A swap under every head, of text, images, sound and series: the tensors, and how far what the head gives moved."""

import pytest
import torch

from hf_xformers.conversion import swap_components
from hf_xformers.variants import config_class, family, model_types
from tests.helpers import make_strong, tiny_fields

HEADS = {head: name for name in reversed(model_types()) for head in config_class(name).heads}
HEADS |= dict.fromkeys(config_class("xformer").heads, "xformer") | {"ForTimeSeriesPrediction": "xf_informer"}
WINDOW = {"type": "band_attention", "window_size": 1}
# Where stack or position have no place for it.
OTHERS = {
    "ForSegmentReordering": {"attention": {"type": "adaptive_span", "max_span": 2}},
    "ForContrastivePrediction": {"normalization": "rms_norm"},
    "ForCTC": {"normalization": "rms_norm"},
}
SHAPES = {"ForCausalLM": "decoder", "ForSeq2SeqLM": "seq2seq"}


def make(head):
    cls = config_class(HEADS[head])
    torch.manual_seed(0)
    return make_strong(family(HEADS[head])[head](cls(**tiny_fields(cls, SHAPES.get(head, "encoder")))).eval())


@pytest.mark.parametrize("head", HEADS)
def test_every_head(head):
    source = make(head)
    model, report = swap_components(source, **OTHERS.get(head, {"attention": WINDOW}))
    found = report.movement
    assert type(model).__name__.endswith(head) and report.changes
    assert (found.states if found.kl_mean is None else found.kl_mean) > 0
    _, report = swap_components(source, max_length=source.config.max_position_embeddings)
    found = report.movement
    assert (found.states if found.kl_mean is None else found.kl_max) < 1e-5


def test_vectors_of_texts():
    source = make("ForTextContrast")
    model, report = swap_components(source, attention=WINDOW)
    found = report.movement
    ids = torch.randint(5, source.config.vocab_size, (found.rows * found.length,), generator=_generator())
    with torch.no_grad():
        old, new = (each(input_ids=ids.view(found.rows, -1)).vectors for each in (source, model))
    assert found.text == "random tokens"
    assert found.states == pytest.approx(((new - old).norm() / old.norm()).item(), rel=1e-4)


def test_forecasts():
    source = make("ForTimeSeriesPrediction")
    model, report = swap_components(source, attention=WINDOW)
    head, series = source.config.head, source.config.embedding
    drawn = _generator()
    given = {"past_values": torch.randn(1, head.context_length, series.channels, generator=drawn)}
    if series.time_features:
        given["past_time_features"] = torch.randn(1, head.context_length, series.time_features, generator=drawn)
        given["future_time_features"] = torch.randn(1, head.prediction_length, series.time_features, generator=drawn)
    with torch.no_grad():
        old, new = (each(**given).prediction_outputs for each in (source, model))
    assert report.movement.states == pytest.approx(((new - old).norm() / old.norm()).item(), rel=1e-4)
    assert str(report.movement).endswith("on random values")


def test_a_new_head_has_no_say(tmp_path):
    """Its tensors are new, and the movement is that of the states below it."""
    source = make("Model")
    source.save_pretrained(tmp_path / "bare")
    _, report = swap_components(tmp_path / "bare", head="ForTextContrast", attention=WINDOW)
    assert {"projection.weight", "projection.bias"} <= set(report.new) and "projection.weight" not in report.kept
    _, bare = swap_components(tmp_path / "bare", attention=WINDOW)
    assert report.movement.kl_mean is None and report.movement.states == pytest.approx(bare.movement.states)
    alone, report = swap_components(tmp_path / "bare", head="ForTextContrast")  # and nothing else changes
    assert report.source == type(source).__name__ and report.movement is None
    assert type(alone).__name__ == type(source).__name__.replace("Model", "ForTextContrast")
    state = alone.state_dict()
    assert all(torch.equal(state[f"model.{name}"], kept) for name, kept in source.state_dict().items())
    for seed in (0, 1):
        other, _ = swap_components(tmp_path / "bare", head="ForTextContrast", seed=seed)
        assert torch.equal(other.projection.weight, alone.projection.weight) == (seed == 0)
    with pytest.raises(ValueError, match="Nothing to swap"):
        swap_components(tmp_path / "bare", head="Model")
    with pytest.raises(ValueError, match="no such class or head 'ForPoetry'; say which `head` it has: Model"):
        swap_components(tmp_path / "bare", head="ForPoetry", attention=WINDOW)


def _generator():
    return torch.Generator().manual_seed(0)
