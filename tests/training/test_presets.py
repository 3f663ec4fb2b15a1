import pytest
import torch

from hf_xformers.objectives import build_objective
from hf_xformers.training.building import build_config, build_model, objectives_for
from hf_xformers.training.presets import SIZES, nearest_size, size_fields, training_defaults
from hf_xformers.variants import config_class, model_types


def parameters(variant, size, objective):
    """Counted without memory for them."""
    objective = build_objective(objective)
    config = build_config(config_class(variant), size, objective)
    with torch.device("meta"):
        return build_model(config, objective).num_parameters()


@pytest.mark.parametrize("variant, objective", [("bert", "mlm"), ("gpt2", "clm"), ("t5", "span"), ("bart", "span")])
def test_tiny_is_one_to_two_millions(variant, objective):
    assert 1.0e6 < parameters(variant, "tiny", objective) < 2.2e6


def test_bert_sizes_count_what_the_layers_hold():
    for name, size in SIZES.items():
        width, layers = size.hidden_size, size.num_hidden_layers
        layer = 4 * (width * width + width) + 2 * 4 * width * width + 5 * width + 4 * width
        table = (size.vocab_size + 512 + 2) * width + 2 * width
        head = width * width + width + 2 * width + size.vocab_size
        assert parameters("bert", name, "mlm") == layers * layer + table + head


@pytest.mark.parametrize("variant", list(model_types()))
def test_every_variant_builds_at_every_size(variant):
    cls = config_class(variant)
    for objective in objectives_for(cls):
        for size in SIZES:
            config = build_config(cls, size, build_objective(objective))
            assert config.hidden_size == size_fields(cls, size, two_towers=False)["hidden_size"]


def test_the_feedforward_ratio_is_the_variants():
    class Wide(config_class("bert")):
        model_type = "xf_test_wide"
        intermediate_size: int = 2048

    assert size_fields(Wide, "small", two_towers=False)["intermediate_size"] == 1368  # 512 * 2048 / 768, in eights


def test_a_variant_may_bring_its_own_sizes():
    class Staged(config_class("bert")):
        model_type = "xf_test_staged"
        sizes = {"tiny": {"num_hidden_layers": 3}}

    assert size_fields(Staged, "tiny", two_towers=False)["num_hidden_layers"] == 3
    assert size_fields(Staged, "small", two_towers=False)["num_hidden_layers"] == 6


def test_two_towers_share_the_layers():
    assert size_fields(config_class("t5"), "base", two_towers=True)["num_hidden_layers"] == 6


@pytest.mark.parametrize("width, size", [(None, "tiny"), (16, "tiny"), (128, "tiny"), (768, "base"), (4096, "large")])
def test_the_size_of_a_model_from_elsewhere(width, size):
    assert nearest_size(width) == size


def test_unknown_size_is_refused():
    with pytest.raises(ValueError, match="unknown size 'huge': choose one of tiny, small, base, large"):
        training_defaults("huge")
