"""A model whose later layers are on another device, as Accelerate dispatches it: the second one is pretended."""

import pytest
import torch
from accelerate.hooks import ModelHook, add_hook_to_module
from accelerate.utils import send_to_device
from torch import nn

from hf_xformers.core.call import Call
from hf_xformers.modeling_tower import XFormerTower
from tests.common.cases import CASES, COMPONENTS
from tests.helpers import close, pad, tokens
from tests.pretend_cuda import GPU, LOG, OnGPU, on_gpu, pretend_cuda

HOST = torch.device("cpu")
BORROWS = [case for case in CASES if case.name in ("shared_attention", "shared_feedforward")]


class MovesArguments(ModelHook):
    """Accelerate's `AlignDevicesHook`, beside what it does to weights."""

    def __init__(self, device):
        self.device = device

    def pre_forward(self, module, *args, **kwargs):
        return send_to_device(args, self.device), send_to_device(kwargs, self.device)


def divided(model):
    """The first layer and what stands before it on the host, all other layers on the pretended device, with hooks of
    Accelerate on every module that has tensors."""
    first, *others = [tower for tower in model.modules() if isinstance(tower, XFormerTower)]
    away: set[nn.Module] = set()
    for tower, begin in ((first, 1), *((tower, 0) for tower in others)):
        for part in (*tower.layers[begin:], tower.stack, tower.final_norm):
            away |= set() if part is None else set(on_gpu(part).modules())

    around = (model, getattr(model, "model", None), first, *others)
    for module in model.modules():
        if module not in around and module.state_dict():
            add_hook_to_module(module, MovesArguments(GPU if module in away else HOST))
    return model


def mixed():
    """Operations of this package with operands on both devices."""
    between = [name for name in LOG.copies if name.startswith(("index", "_index", "copy_", "_to_copy"))]
    return [name for name in (*LOG.mixed, *between) if "transformers/" not in name]


def run(case, model):
    ids, mask = pad([tokens(9), tokens(5, seed=1)], 9, "left")
    with torch.no_grad():
        found = [case.run(model, ids, given) for given in (None, mask)]
    return [logits.inner if isinstance(logits, OnGPU) else logits for logits in found]


@pytest.mark.parametrize("case", [*COMPONENTS, *(case for case in BORROWS if case not in COMPONENTS)], ids=str)
def test_the_call_s_context_goes_along(case, monkeypatch):
    expected = run(case, case.shared(torch.float32))
    with pretend_cuda(monkeypatch):
        model = divided(case.build(dtype=torch.float32).eval())
        LOG.clear()
        found = run(case, model)
        assert not mixed()
    for one, other in zip(found, expected, strict=True):
        close(one, other, 1e-5)


@torch.no_grad()
@pytest.mark.parametrize("case", [case for case in COMPONENTS if case.shape != "encoder"], ids=str)
def test_caches_go_along(case, monkeypatch):
    """Text in pieces, padded on the left."""

    def pieces(model):
        ids, mask = pad([tokens(9), tokens(5, seed=1)], 9, "left")
        given, prefix, past, found = {}, "", None, []
        if case.shape == "seq2seq":
            read = model.get_encoder()(input_ids=ids, attention_mask=mask)
            given, prefix = {"encoder_outputs": read, "attention_mask": mask}, "decoder_"
        for begin, end in ((0, 5), (5, 6), (6, 9)):
            own = {f"{prefix}input_ids": ids[:, begin:end], f"{prefix}attention_mask": mask[:, :end]}
            output = model(**given, **own, past_key_values=past, use_cache=True)
            past = output.past_key_values
            found.append(output.logits)
        return [logits.inner if isinstance(logits, OnGPU) else logits for logits in found]

    expected = pieces(case.build(dtype=torch.float32).eval())
    with pretend_cuda(monkeypatch):
        model = divided(case.build(dtype=torch.float32).eval())
        LOG.clear()
        found = pieces(model)
        assert not mixed()
    for one, other in zip(found, expected, strict=True):
        close(one, other, 1e-4)


@pytest.mark.parametrize("name", ["score_bias_post_ln-encoder", "xf_reformer-encoder", "shared_attention-encoder"])
def test_gradients_come_back(name, monkeypatch):
    """Through a bias of scores, which all layers read from a module of the first device; layers run twice. Those of a
    reversible stack are run backward one sublayer at a time."""
    case = next(case for case in CASES if str(case) == name)
    grads = []
    for there in (False, True):
        model = case.build(dtype=torch.float32).train()
        if case.preset.stack.type != "reversible":  # which computes layers again by itself
            model.gradient_checkpointing_enable()
        if not there:
            case.run(model, tokens(2, 9)).square().sum().backward()
            grads.append({name: one.grad for name, one in model.named_parameters()})
            continue
        with pretend_cuda(monkeypatch):
            case.run(divided(model), tokens(2, 9)).square().sum().backward()
            assert not mixed()
            found = {name: one.grad for name, one in model.named_parameters()}
            grads.append({name: one.inner if isinstance(one, OnGPU) else one for name, one in found.items()})
    for name, one in grads[0].items():
        close(grads[1][name], one, 1e-4)


def test_what_is_there_already_stays():
    index = torch.arange(3)
    context = Call(None, index[None], index, index, causal=True, fresh=True)
    assert context.to("cpu") is context
