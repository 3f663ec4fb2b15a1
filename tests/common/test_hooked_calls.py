"""Contract: whoever hooks the calls of modules, as Accelerate does to bring weights from elsewhere, meets all of them.

Accelerate moves each argument of a hooked module that has a `to`, and a module's weights are there in its calls alone.
"""

from collections.abc import Mapping

import pytest
import torch
from accelerate import cpu_offload
from accelerate.big_modeling import attach_layerwise_casting_hooks
from torch import nn

from hf_xformers.core.reading_weights import weight_of
from tests.common.cases import CASES, components, covering
from tests.helpers import close, pad, tokens


def modules_in(argument):
    if isinstance(argument, nn.Module):
        return [argument]
    inner = list(argument.values()) if isinstance(argument, Mapping) else argument
    return [module for part in inner for module in modules_in(part)] if isinstance(inner, (list, tuple)) else []


COVER = covering(CASES, lambda case: {(slot, name, is_decoder) for slot, name, _, is_decoder in components(case)})


@pytest.mark.parametrize("case", COVER, ids=str)
def test_weights_come_for_each_call(case):
    """And no module is an argument of another's call."""
    ids, mask = pad([tokens(9), tokens(5, seed=1)], 9, "left")
    model, found = case.shared(torch.float32), []

    def look(module, args, kwargs):
        given = {**dict(enumerate(args)), **kwargs}
        found.extend((type(module).__name__, name) for name in given if modules_in(given[name]))

    handles = [module.register_forward_pre_hook(look, with_kwargs=True) for module in model.modules()]
    try:
        with torch.no_grad():
            expected = [case.run(model, ids, given) for given in (None, mask)]
    finally:
        for handle in handles:
            handle.remove()
    assert not found
    model = cpu_offload(case.build(dtype=torch.float32), execution_device="cpu", offload_buffers=True)
    assert all(parameter.is_meta for parameter in model.parameters())
    with torch.no_grad():
        for given, wanted in zip((None, mask), expected, strict=True):
            close(case.run(model, ids, given), wanted, 1e-5)


def test_a_weight_that_is_kept_in_fewer_bits():
    """What is read outside of a call is what the call would compute with."""
    module = nn.Linear(4, 3)
    expected = module.weight.detach().to(torch.float8_e4m3fn).float()
    attach_layerwise_casting_hooks(module, storage_dtype=torch.float8_e4m3fn, compute_dtype=torch.float32)
    found = weight_of(module)
    assert module.weight.dtype == torch.float8_e4m3fn
    assert torch.equal(found, expected)


SHARES = {  # of a model that may stay in memory: layers are divided where nothing else is left
    "xf_bert-encoder": 0.55, "xf_t5-seq2seq": 0.55, "modern-decoder": 0.55, "xf_reformer-decoder": 0.35,
    "xf_reformer-seq2seq": 0.55, "adaptive_vocabulary-encoder": 0.35,
}  # fmt: skip
SOME = [case for case in CASES if str(case) in SHARES]


@pytest.mark.parametrize("case", SOME, ids=str)
def test_a_part_on_the_disk(case, tmp_path):
    model, ids = case.shared(torch.float32), tokens(9)[None]
    model.save_pretrained(tmp_path)
    size = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    memory = {"cpu": int(SHARES[str(case)] * size)}
    loaded = case.family[case.head].from_pretrained(
        tmp_path, device_map="auto", max_memory=memory, offload_folder=tmp_path / "elsewhere"
    )
    assert any(parameter.is_meta for parameter in loaded.parameters())
    with torch.no_grad():
        close(case.run(loaded, ids), case.run(model, ids), 1e-5)
        if case.shape == "decoder":
            given = {"input_ids": ids, "max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
            assert torch.equal(loaded.generate(**given), model.generate(**given))
