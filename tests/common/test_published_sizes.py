"""Models with the names of published ones have exactly as many parameters."""

import pytest
import torch

from hf_xformers import XFBertConfig
from hf_xformers.variants import config_class, family, model_types

# head, preset -> parameters, tied ones once; what ours has beside them: biases that are zero in published weights, or
# that are buffers there.
PUBLISHED = {
    "xf_bert": ("ForPreTraining", {"base": 110106428, "large": 336226108}),
    "xf_roberta": ("ForMaskedLM", {"base": 124697433, "large": 355412057}),
    "xf_gpt": ("ForCausalLM", {"base": 116534784}),
    "xf_gpt2": ("ForCausalLM", {"small": 124439808, "medium": 354823168, "large": 774030080, "xl": 1557611200}),
    "xf_image_gpt": ("ForCausalLM", {"small": 76682240, "medium": 455489536, "large": 1362914304}),
    "xf_gpt3_alternating": (
        "ForCausalLM",
        {
            "small": 125226240,
            "medium": 355871744,
            "large": 760300032,
            "2.7b": 2651553280,
            "6.7b": 6658404352,
            "175b": 174604259328,
        },
    ),
    "xf_bart": ("ForSeq2SeqLM", {"base": 139420416, "large": 406291456}),
    "xf_t5": (
        "ForSeq2SeqLM",
        {"small": 60506624, "base": 222903552, "large": 737668096, "3b": 2851598336, "11b": 11307321344},
    ),
    "xf_xlnet": ("ForMaskedLM", {"base": 116750336, "large": 360300800}),
    "xf_electra": ("ForReplacedTokenDetection", {"small": 13549057, "base": 109483009, "large": 335142913}),
    "xf_deberta": ("Model", {"base": 138601728, "v2_xlarge": 884593152, "v3_base": 183831552}),
    "xf_albert": ("Model", {"base": 11683584, "large": 17683968, "xlarge": 58724864, "xxlarge": 222595584}),
    "xf_megatron": (  # by V D + P D + S D + L (12 D^2 + 13 D) + 2 D, and for encoders D^2 + D
        "Model",
        {
            "bert_336m": 333640704,
            "bert_1.3b": 1273358336,
            "bert_3.9b": 3858731520,
            "gpt_355m": 355788800,
            "gpt_1.2b": 1213479936,
            "gpt_2.5b": 2490408960,
            "gpt_8.3b": 8317040640,
            "turing_nlg": 17180859136,
        },
    ),
    # bert-base-cased and bert-large-cased, with six types of tokens in place of two
    "xf_unilm": ("Model", {"base": 108310272 + 4 * 768, "large": 333579264 + 4 * 1024}),
    "xf_bigbird": ("ForMaskedLM", {"base": 128111286}),
    "xf_switch_transformer": ("ForSeq2SeqLM", {"base_8": 619339008}),
    # By L (24 D^2 + 63 D) + 29 D^2 + 12 D: with the transducer of the paper, an LSTM, 10.3, 30.7 and 118.8 million.
    "xf_conformer": ("Model", {"small": 8710848, "medium": 27327488, "large": 115111424}),
}
BESIDE = {
    ("xf_bart", "base"): 50265,
    ("xf_bart", "large"): 50265,
    ("xf_deberta", "base"): 12 * 768,
    ("xf_bigbird", "base"): -768 * 769,  # the pooler of the published class, which nothing reads
}
CASES = [(name, head, preset, count) for name, (head, sizes) in PUBLISHED.items() for preset, count in sizes.items()]


@pytest.mark.parametrize(("name", "head", "preset", "count"), CASES, ids=[f"{c[0]}-{c[2]}" for c in CASES])
def test_parameters(name, head, preset, count):
    with torch.device("meta"):
        model = family(name)[head](config_class(name).preset(preset))
    assert model.num_parameters() == count + BESIDE.get((name, preset), 0)


def test_every_preset_is_counted():
    named = {name: set(config_class(name).presets) for name in model_types() if config_class(name).presets}
    assert named == {name: set(sizes) for name, (_, sizes) in PUBLISHED.items()}


def test_changes_and_unknown_names():
    changed = XFBertConfig.preset("large", vocab_size=99)
    assert (changed.hidden_size, changed.vocab_size) == (1024, 99)
    with pytest.raises(ValueError, match="XFBertConfig has no preset 'huge'; there are: base, large"):
        XFBertConfig.preset("huge")
