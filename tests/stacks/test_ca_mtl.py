"""Alignment, conditional norms and bottleneck of CA-MTL against their equations, and a pretrained model at the
start."""

import pytest
import torch

from hf_xformers import XFormerConfig
from hf_xformers.conversion.swap import swap_components
from hf_xformers.normalization.conditional_post_ln import ConditionalPostNorm
from hf_xformers.stacks.ca_mtl import Alignment, ConditionalBottleneck
from hf_xformers.variants import family
from tests.compression.models import GEOMETRY, batch, tiny
from tests.helpers import close, make_strong

WIDTH = GEOMETRY["hidden_size"]
WHOLE = {
    "stack": {"type": "ca_mtl", "num_tasks": 3},
    "residual": "conditional_post_ln",
    "attention": {"type": "ca_mtl", "num_blocks": 4},
}
TASKS = torch.tensor([2, 0])


def vectors(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def normal(x, eps=1e-5):
    return (x - x.mean(-1, keepdim=True)) / (x.var(-1, keepdim=True, unbiased=False) + eps).sqrt()


@torch.no_grad()
def test_the_alignment_is_a_matrix_whose_columns_the_task_modulates():
    module = make_strong(Alignment(6).double(), amount=0.3)
    x, z = vectors(2, 5, 6), vectors(2, 6, seed=1)
    found = module(x, z)
    for row in range(2):
        gamma, beta = module.film(z[row]).chunk(2)
        matrix = torch.zeros(6, 6, dtype=torch.float64)
        for i in range(6):
            for j in range(6):
                matrix[i, j] = (1 + gamma[j]) * module.matrix.weight[j, i] + beta[j]
        close(found[row], x[row] @ matrix)


@torch.no_grad()
def test_a_conditional_norm_changes_the_gain_alone():
    config = XFormerConfig(**GEOMETRY, stack="ca_mtl", residual="conditional_post_ln")
    frame = make_strong(config.residual.build(config, layer_idx=2).double(), amount=0.3)
    assert isinstance(frame, ConditionalPostNorm)
    x, f, z = vectors(2, 5, WIDTH), vectors(2, 5, WIDTH, seed=1), vectors(2, WIDTH, seed=2)
    gamma, beta = frame.gain.film(z).chunk(2, dim=-1)
    gain = (1 + gamma) * frame.norm.weight + beta
    close(frame.leave(x, f, task=z), gain[:, None] * normal(x + f) + frame.norm.bias)


@torch.no_grad()
def test_the_bottleneck():
    module = make_strong(ConditionalBottleneck(6, 2, 1e-5).double(), amount=0.3)
    x, z = vectors(2, 5, 6), vectors(2, 6, seed=1)
    gamma, beta = module.film(z).chunk(2, dim=-1)
    read = (1 + gamma[:, None]) * x + beta[:, None]
    inner = read @ module.down.weight.T + module.down.bias
    y = x + inner @ module.up.weight.T + module.up.bias
    gamma, beta = module.gain.film(z).chunk(2, dim=-1)
    gain = (1 + gamma) * module.norm.weight + beta
    close(module(x, z), gain[:, None] * normal(y) + module.norm.bias)


def test_where_its_parts_stand():
    """Norms of the upper half, one table of tasks for all that reads it, a third of the width."""
    model = tiny("ForMaskedLM", num_hidden_layers=4, **WHOLE)
    names = dict(model.named_parameters())
    gains = sorted({int(name.split(".")[3]) for name in names if "_residual.gain" in name})
    assert gains == [2, 3]
    assert [name for name in names if "task_table" in name] == ["model.trunk.stack.task_table.weight"]
    assert names["model.trunk.stack.bottleneck.down.weight"].shape == (WIDTH // 3, WIDTH)
    all_of_them = tiny("ForMaskedLM", stack="ca_mtl", residual={"type": "conditional_post_ln", "layers": "all"})
    assert sum("_residual.gain.film.weight" in name for name in dict(all_of_them.named_parameters())) == 2 * 3


def fresh(**fields):
    torch.manual_seed(0)
    return family("xformer")["ForMaskedLM"](XFormerConfig(**{**GEOMETRY, **fields})).double().eval()


def test_a_fresh_model_is_its_base():
    """gamma = beta = A = 0 and R the identity: what pretrained layers make is left alone, whatever the task."""
    base = make_strong(fresh(), amount=0.2)
    stack = {"type": "ca_mtl", "num_tasks": 3, "reduction": None}
    model = fresh(**{**WHOLE, "stack": stack})
    left = model.load_state_dict(base.state_dict(), strict=False)
    assert not left.unexpected_keys
    assert left.missing_keys and all(any(part in key for part in NEW) for key in left.missing_keys)
    inputs = batch()
    for task in range(3):
        found = model(**inputs, tasks=torch.full((2,), task))
        close(found.logits, base(**inputs).logits, 1e-9)
    swapped, _ = swap_components(base.float(), measure=False, stack=stack, residual="conditional_post_ln")
    close(swapped(**inputs, tasks=TASKS).logits, base(**inputs).logits, 1e-4)


NEW = ("task_table", "task_proj", "alignment", ".film", ".near", ".gain")


def test_tasks_of_a_batch():
    """A batch of several tasks is what each text gives alone; tasks differ, unless their vectors are equal; every
    parameter learns."""
    model = tiny("ForMaskedLM", **WHOLE)
    inputs = batch()
    labels = inputs.pop("labels")
    with torch.no_grad():
        both = model(**inputs, tasks=TASKS).logits
        for row in range(2):
            alone = {name: value[row : row + 1] for name, value in inputs.items()}
            close(model(**alone, tasks=TASKS[row : row + 1]).logits, both[row : row + 1])
        other = model(**inputs, tasks=torch.tensor([1, 0])).logits
        assert (other[0] - both[0]).abs().max() > 1e-3
        close(other[1], both[1])
    model.train()(**inputs, tasks=TASKS, labels=labels).loss.backward()
    left_out = "model.trunk.stack.task_table.weight"
    assert all(p.grad.abs().sum() > 0 for name, p in model.named_parameters())
    assert model.get_parameter(left_out).grad[1].abs().sum() == 0
    with torch.no_grad():
        model.get_parameter(left_out)[1] = model.get_parameter(left_out)[2]
        model.eval()
        close(model(**inputs, tasks=torch.tensor([1, 0])).logits, model(**inputs, tasks=TASKS).logits)


def test_generation_carries_the_task():
    model, inputs = tiny(**WHOLE), batch()
    options = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    ids = inputs["input_ids"][1:, :4]
    cached = model.generate(ids, tasks=TASKS[:1], **options)
    assert torch.equal(cached, model.generate(ids, tasks=TASKS[:1], use_cache=False, **options))


def test_the_task_has_to_be_told():
    model = tiny("ForMaskedLM", **WHOLE)
    with pytest.raises(ValueError, match="for 3 tasks: give `tasks`"):
        model(**batch())
    with pytest.raises(ValueError, match=r"`tasks` must be \[batch\]"):
        model(**batch(), tasks=torch.zeros(2, 3).long())
