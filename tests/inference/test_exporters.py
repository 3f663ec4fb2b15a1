"""transformers' own exporters: graphs of reading a prompt and of going on with a cache, at sizes not traced.

Encoders, images, calls without a cache and ONNX: `test_ours_export_*` of the conformance run; ONNX with a cache:
`test_step_export.py`."""

import torch
from transformers.exporters import DynamoConfig, DynamoExporter

from hf_xformers.compat import CACHE
from tests.common.cases import CASES
from tests.helpers import close, pad, tokens


def exported(model, exporter, config):
    ids, mask = pad([tokens(7), tokens(5, seed=1)], 7, "left")
    given = {"input_ids": ids, "attention_mask": mask}
    made = exporter().export_for_generation(model, given, config(dynamic=True), multi_token_decode=True)
    assert set(made.components) == {"prefill", "decode"}, "a text model has no encoders of images or sound"
    return made.runners["decode"]


def going_on(model, decode, prefix):
    """Tokens after a cache of another length, for other texts than the traced ones."""
    ids = tokens(3, 9, seed=4)
    with torch.no_grad():
        expected = model(ids, use_cache=False).logits[:, prefix:]
        cache = model(ids[:, :prefix], use_cache=True)[CACHE]
        mask, places = torch.ones(3, 9, dtype=torch.long), torch.arange(prefix, 9).expand(3, -1)
        given = {"input_ids": ids[:, prefix:], "attention_mask": mask, CACHE: cache}
        close(decode(**given, position_ids=places).logits, expected, 1e-4)


def case_named(name):
    return next(case for case in CASES if str(case) == name)


def test_decoding_with_a_cache():
    model = case_named("modern-decoder").build(dtype=torch.float32, num_hidden_layers=1)
    decode = exported(model, DynamoExporter, DynamoConfig)
    for prefix in (6, 4):
        going_on(model, decode, prefix)
