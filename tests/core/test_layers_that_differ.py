"""Parts of a whole stack, where its layers differ in what the parts are made of."""

import pytest

from hf_xformers.variants import config_class, family
from tests.helpers import tiny_fields


@pytest.mark.parametrize("name", ["han_nmt", "memformer"])
def test_a_stack_with_heads_of_its_own_has_those_of_the_first_layer(name):
    fields = tiny_fields(config_class(name), "seq2seq", is_decoder=False, is_encoder_decoder=True)
    config = config_class(name)(**fields, per_layer_config={1: {"num_attention_heads": 1}})
    model = family(name)["ForSeq2SeqLM"](config)
    of_stacks = [module for module in model.modules() if type(module).__module__.startswith("hf_xformers.stacks")]
    heads = {getattr(module, "num_heads", getattr(module, "heads", None)) for module in of_stacks} - {None}
    assert heads == {config.layer(0).num_attention_heads} != {1}
