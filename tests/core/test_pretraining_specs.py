"""Settings of pretraining heads: what configs store and refuse, and that saved models keep them."""

from __future__ import annotations

import copy
import dataclasses
import json
import pickle

import pytest
import torch

from hf_xformers import XFElectraConfig, XFormerConfig, XFSpanBertConfig
from hf_xformers.core.changes import merge_changes
from hf_xformers.core.pretraining_specs import PRETRAINING, PretrainingSpec, changed_pretraining
from hf_xformers.modeling.replaced_tokens import ReplacedTokensSpec
from hf_xformers.modeling.span_boundary import SpanBoundarySpec
from hf_xformers.objectives import build_objective
from hf_xformers.training.building import build_config, decided_fields
from hf_xformers.training.run_folder import check_same_run
from hf_xformers.variants import config_class, family
from tests.helpers import make_strong

SIZES = dict(
    vocab_size=40,
    hidden_size=16,
    num_hidden_layers=2,
    num_attention_heads=4,
    intermediate_size=24,
    max_position_embeddings=32,
)
# Of every setting a value that is no default.
SETTINGS = {
    "sentence_pairs": {"classes": 3},
    "replaced_tokens": {
        "generator_size": 0.5,
        "generator_depth": 0.75,
        "generator_sharing": "untied",
        "generator_temperature": 2.0,
        "generator_avoids_original": True,
        "detection_weight": 7,
        "detection_context": True,
    },
    "text_contrast": {
        "loss": "ranking",
        "temperature": 0.5,
        "margin": 0.25,
        "noise_power": 0.5,
        "gather_negatives": False,
    },
    "phrase_contrast": {
        "temperature": 2.0,
        "contrast_weight": 0.5,
        "masked_lm_weight": 0.25,
        "gather_negatives": False,
    },
    "bidirectional_lm": {"share_embedding": False, "share_softmax": False, "mix": "scalar"},
    "reordering": {"chunks": 2},
    "span_boundary": {"places": 5, "place_width": 6, "weight": 0.5},
    "contrastive_prediction": {"weight": 0.5},
    "multi_token_prediction": {"depth": 2, "weight": 0.5},
}
IDS = torch.arange(5, 21).view(2, 8)
READ = IDS.index_fill(1, torch.tensor([2]), 4)
LABELS = torch.where(READ == 4, IDS, -100)
SENTENCES = {
    "sentence_ids": torch.tensor([[0, 0, 0, 1, 1, 1, 2, 2]] * 2),
    "masked_sentences": torch.tensor([[1], [2]]),
    "sentence_input_ids": IDS[:, None, 3:6],
}
SPANS = {
    "span_boundaries": torch.tensor([[[1, 3]], [[2, 5]]]),
    "span_target_places": torch.tensor([[0], [1]]),
    "span_labels": torch.tensor([[7], [9]]),
}
# Variant, head, a call that every setting above shows in.
CALLS = [
    ("xf_bert", "ForPreTraining", {"labels": LABELS, "next_sentence_label": torch.tensor([2, 0])}),
    ("xf_electra", "ForReplacedTokenPreTraining", {"labels": IDS}),
    ("xf_deberta", "ForReplacedTokenDetection", {"labels": IDS % 2}),
    ("xf_bert", "ForTextContrast", {"labels": torch.zeros(2).long(), "second_input_ids": IDS}),
    ("xf_bert", "ForPhraseContrast", {"labels": LABELS, "phrase_input_ids": IDS[:, 2:4]}),
    ("xf_gpt", "ForBidirectionalLM", {"labels": IDS}),
    ("xf_deepseek_moe", "ForMultiTokenPrediction", {"labels": IDS}),
    ("xf_ernie_doc", "ForSegmentReordering", {"labels": LABELS, "reordering_labels": torch.tensor([0, 2])}),
    ("xf_span_bert", "ForSpanBoundary", {"labels": LABELS, **SPANS}),
    ("xf_etc", "ForContrastivePrediction", {"labels": LABELS, **SENTENCES}),
]


def plain(config: XFormerConfig) -> dict[str, dict]:
    return {name: spec.plain() for name, spec in config.pretraining.items()}


@torch.no_grad()
@pytest.mark.parametrize(("variant", "head", "call"), CALLS, ids=[f"{head}-{name}" for name, head, _ in CALLS])
def test_a_saved_model_keeps_its_settings(variant, head, call, tmp_path):
    cls = family(variant)[head]
    torch.manual_seed(0)
    model = make_strong(cls(config_class(variant)(**SIZES, pretraining=SETTINGS)).eval())
    model.save_pretrained(tmp_path)
    again, report = cls.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert again.state_dict().keys() == model.state_dict().keys() and again.config.pretraining == SPECS
    ours, theirs = model(READ, **call), again.eval()(READ, **call)
    assert torch.equal(ours.loss, theirs.loss) and torch.equal(ours[1], theirs[1])
    # The settings are read: with the defaults of the specs it is another model, or another loss.
    other = cls(config_class(variant)(**SIZES, pretraining={name: PRETRAINING.get(name)() for name in SETTINGS}))
    shapes = [{name: value.shape for name, value in net.state_dict().items()} for net in (model, other)]
    if shapes[0] == shapes[1]:
        other.load_state_dict(model.state_dict())
        assert not torch.equal(other.eval()(READ, **call).loss, ours.loss)


SPECS = changed_pretraining({}, SETTINGS)


def test_what_is_stored():
    """What the variant has decided, and what differs from the defaults; in whole."""
    assert XFormerConfig(**SIZES).pretraining == {} and "pretraining" not in XFormerConfig(**SIZES).to_dict()
    default = XFormerConfig(**SIZES, pretraining={"span_boundary": {"places": 20}})
    assert default.pretraining == {} and "pretraining" not in default.to_diff_dict()
    electra = XFElectraConfig(pretraining={"replaced_tokens": {"detection_weight": 10}})
    assert plain(electra)["replaced_tokens"]["generator_size"] == 1 / 3  # not given: the variant's own
    assert (
        ReplacedTokensSpec.of(electra).detection_weight == 10
        and ReplacedTokensSpec.of(XFormerConfig()).detection_weight == 50
    )
    assert plain(XFSpanBertConfig()) == {"span_boundary": {"places": 20, "place_width": 200, "weight": 1.0}}
    small = XFElectraConfig.preset("small", pretraining={"replaced_tokens": {"generator_depth": 0.5}})
    assert (ReplacedTokensSpec.of(small).generator_size, ReplacedTokensSpec.of(small).generator_depth) == (0.25, 0.5)


def test_round_trip(tmp_path):
    config = XFElectraConfig(**SIZES, pretraining=SETTINGS)
    config.save_pretrained(tmp_path)
    again = XFElectraConfig.from_pretrained(tmp_path)
    assert again.pretraining == config.pretraining == SPECS and plain(again) == SETTINGS
    assert XFElectraConfig(**{**config.to_dict(), "model_type": None}).pretraining == SPECS
    for copied in (copy.deepcopy(config), pickle.loads(pickle.dumps(config))):
        assert copied.pretraining == SPECS and copied.to_dict() == config.to_dict()


def test_configs_share_nothing():
    given = {"span_boundary": SpanBoundarySpec(weight=0.5)}
    first, second = XFormerConfig(**SIZES, pretraining=given), XFormerConfig(**SIZES, pretraining=given)
    with pytest.raises(dataclasses.FrozenInstanceError):
        first.pretraining["span_boundary"].weight = 2
    first.pretraining["span_boundary"] = SpanBoundarySpec(weight=3)
    assert SpanBoundarySpec.of(second).weight == given["span_boundary"].weight == 0.5
    one, two = XFElectraConfig(), XFElectraConfig()
    assert one.pretraining is not two.pretraining
    one.pretraining.clear()
    assert two.pretraining and XFElectraConfig().pretraining == two.pretraining
    first.pretraining["span_boundary"] = {"weight": 3}
    with pytest.raises(TypeError, match="assign the whole mapping"):
        SpanBoundarySpec.of(first)


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"span_bound": {}}, ValueError, "Unknown pretraining spec 'span_bound'. Did you mean 'span_boundary'"),
        ({"span_boundary": {"place": 3}}, ValueError, "Unknown field 'place'.*Did you mean 'places'.*Its fields are"),
        ({"span_boundary": {"places": "many"}}, TypeError, "'places' expected int, got str"),
        ({"span_boundary": {"type": "reordering"}}, ValueError, "has 'type' 'reordering'; leave it out"),
        ({"span_boundary": 3}, TypeError, "must be a dict of fields or a spec, got int"),
        ({"span_boundary": ReplacedTokensSpec()}, TypeError, "was given the settings of 'replaced_tokens'"),
        ("span_boundary", TypeError, "expected a dict, got str"),
    ],
)
def test_refusals(given, error, message):
    with pytest.raises(error, match=message):
        XFormerConfig(**SIZES, pretraining=given)


def test_specs_are_named_after_their_files():
    """So that a config of one head imports that head alone."""
    for name in PRETRAINING:
        cls = PRETRAINING.get(name)
        assert issubclass(cls, PretrainingSpec) and cls.__module__ == f"hf_xformers.modeling.{name}" and cls.summary


def test_objectives_change_what_they_say():
    """The rest stays as the variant, or the saved model, has it."""
    objective = build_objective({"type": "rtd", "generator_size": 0.5, "detection_weight": 10})
    assert build_objective("rtd").config_fields() == {}
    config = build_config(config_class("xf_deberta"), "tiny", objective)
    found = ReplacedTokensSpec.of(config)
    assert (found.generator_size, found.detection_weight, found.generator_depth) == (0.5, 10, 0.5)
    assert found.generator_sharing == "gradient_disentangled" and found.detection_context
    saved = XFSpanBertConfig(**SIZES, pretraining=SETTINGS).to_dict()
    decided = decided_fields(build_objective({"type": "span_bert", "sbo_weight": 3}), saved)
    assert decided["pretraining"] == {**SPECS, "span_boundary": SpanBoundarySpec(weight=3)}
    merged = merge_changes(saved, {"pretraining": {"reordering": {"chunks": 1}, "span_boundary": {"places": 9}}})
    assert merged["pretraining"]["span_boundary"] == SpanBoundarySpec(places=9, place_width=6, weight=0.5)
    assert merged["pretraining"]["reordering"].chunks == 1


def test_a_run_of_earlier_days_goes_on(tmp_path):
    """Its record knows less of the objective, which has got settings since."""
    recorded = {
        "type": "replaced_token_detection",
        "mask_prob": 0.15,
        "mask_token_prob": 0.85,
        "with_replacement": True,
    }
    (tmp_path / "training_summary.json").write_text(json.dumps({"objective": recorded, "block_size": 32}))
    plan = {"objective": build_objective("rtd").to_dict(), "block_size": 32}
    check_same_run(plan, tmp_path / "checkpoint-2")
    for changed in ({"mask_prob": 0.2}, {"generator_size": 0.5}):
        other = build_objective({"type": "rtd", **changed}).to_dict()
        with pytest.raises(ValueError, match="resume with the same --objective"):
            check_same_run({**plan, "objective": other}, tmp_path / "checkpoint-2")
