"""Contract: training, checkpointing of activations, adapters."""

import copy

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing

from hf_xformers.blocks.base import XFormerLayer
from tests.common.cases import CASES, components, covering, each_component, each_part
from tests.helpers import NO_DROPOUT, close, close_gradients, pad, tokens

ADAPTED = ("q_proj", "v_proj")
CANONICAL = ("q_proj", "k_proj", "v_proj", "o_proj", "up_proj", "gate_proj", "down_proj")


def output_of(model, ids, mask=None, **more):
    """With `ids` as labels; an encoder-decoder reads and writes them."""
    given = {"input_ids": ids, "attention_mask": mask, "labels": ids, **more}
    if mask is not None:
        given["labels"] = ids.masked_fill(mask == 0, -100)
        if model.config.is_encoder_decoder:
            given["decoder_attention_mask"] = mask
    return model(**given)


def loss_of(model, ids, mask=None):
    return output_of(model, ids, mask).loss


def parameter_gradients(model, ids, mask):
    model.zero_grad()
    torch.manual_seed(0)  # dropout is on: the second pass has to draw the same numbers again
    loss = loss_of(model, ids, mask)
    loss.backward()
    return loss.detach(), {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


@each_component
@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning")
def test_gradient_checkpointing(case):
    """Both kinds run every layer twice and give the gradients of the plain pass."""
    model = case.build().train()
    ids, mask = pad([tokens(9), tokens(5, seed=1)], 9, "right")
    calls = []
    for name, module in model.named_modules():
        if isinstance(module, XFormerLayer):
            for child_name, child in module.named_children():
                child.register_forward_hook(lambda *_, name=f"{name}.{child_name}": calls.append(name))
    loss, expected = parameter_gradients(model, ids, mask)
    plain = list(calls)
    assert plain
    for use_reentrant in (True, False):
        calls.clear()
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": use_reentrant})
        again, found = parameter_gradients(model, ids, mask)
        assert sorted(calls) == sorted(plain * 2), f"use_reentrant={use_reentrant}: layers did not run again"
        close(again, loss)
        close_gradients(found, expected)
        model.gradient_checkpointing_disable()


FILLING = ("xf_albert-decoder", "xf_delta_net-decoder", "xf_longformer-decoder", "xf_t5-seq2seq")


@pytest.mark.parametrize("case", [case for case in CASES if str(case) in FILLING], ids=str)
def test_checkpoints_around_layers(case):
    """Those of torch, which Accelerate puts there for FSDP (`activation_checkpointing`): no cache is filled twice."""
    model = case.build(**NO_DROPOUT).train()
    given = pad([tokens(9), tokens(5, seed=1)], 9, "right")
    loss, expected = parameter_gradients(model, *given)
    apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, XFormerLayer))
    again, found = parameter_gradients(model, *given)
    close(again, loss)
    close_gradients({name.replace("_checkpoint_wrapped_module.", ""): grad for name, grad in found.items()}, expected)


@each_component
def test_state_moves_once(case):
    """Running statistics, centroids and counters are after a step with checkpointing what they are after one
    without."""
    ids, mask = pad([tokens(9), tokens(5, seed=1)], 9, "right")
    if not any(True for _ in case.shared().buffers()):
        return
    found = []
    for kind in (None, True, False):
        model = case.build().train()
        if kind is not None:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": kind})
        for _ in range(2):  # as in accumulation
            parameter_gradients(model, ids, mask)
        found.append(dict(model.named_buffers()))
    for after in found[1:]:
        for name, buffer in after.items():
            close(buffer, found[0][name])


@each_component
def test_training(case):
    """Every parameter gets a gradient, and the loss falls on a fixed batch."""
    model = case.build(strong=False, dtype=torch.float32, **NO_DROPOUT).train()
    ids, mask = pad([tokens(9), tokens(5, seed=1), tokens(7, seed=2)], 9, "right")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(8):
        loss = loss_of(model, ids, mask)
        optimizer.zero_grad()
        loss.backward()
        idle = [name for name, parameter in model.named_parameters() if parameter.grad is None]
        assert not idle, f"without gradient: {idle}"
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.25, losses  # nats; the start is that of a uniform guess


@each_component
def test_layer_drop(case):
    """Refused where a layer would be missed, and trained with otherwise."""
    try:
        model = case.build(strong=False, dtype=torch.float32, layer_drop=0.5).train()
    except ValueError as error:
        assert "`layer_drop`" in str(error)
        return
    ids, mask = pad([tokens(9), tokens(5, seed=1)], 9, "right")
    torch.manual_seed(0)
    for _ in range(5):  # without its first layer, without the second, without any
        assert loss_of(model, ids, mask).isfinite()


@each_component
@torch.no_grad()
def test_dropout_is_switched_off_by_its_modules(case):
    """As trl's trainers do it before they compare a model with its reference."""
    ids, outputs = tokens(2, 9), []
    for rates in (dict.fromkeys(NO_DROPOUT, 0.4), NO_DROPOUT):
        model = case.build(**rates).train()
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
        torch.manual_seed(0)  # for what is drawn besides
        outputs.append(case.run(model, ids))
    close(*outputs)


@each_component
def test_autocast(case):
    """A pass in bfloat16, and gradients from inside of autocast's block as from outside."""
    model = case.build(strong=False, dtype=torch.float32, **NO_DROPOUT)
    ids, mask = pad([tokens(9), tokens(5, seed=1)], 9, "right")
    found = []
    for inside in (False, True):
        model.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = loss_of(model, ids, mask)
            if inside:
                loss.backward()
        if not inside:
            loss.backward()
        found.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    assert loss.isfinite() and all(gradient.isfinite().all() for gradient in found[1].values())
    largest = max(gradient.abs().amax().item() for gradient in found[0].values())
    for name, expected in found[0].items():
        close(found[1][name], expected, 0.01 * largest)


@each_part
def test_padding_has_no_loss(case):
    """A padded text's loss, auxiliary parts included, is that of the text alone; a padded batch's task loss is the
    mean over its real tokens."""
    model = case.shared()
    ids, mask = pad([tokens(9), tokens(4, seed=1)], 9, "right")

    def task_loss(*given):
        output = output_of(model, *given)
        return output.loss - sum((output.aux_losses or {}).values())

    with torch.no_grad():
        close(loss_of(model, ids[1:], mask[1:]), loss_of(model, ids[1:, :4]))
        together, parts = task_loss(ids, mask), [task_loss(row) for row in (ids[:1], ids[1:, :4])]
    counts = [8, 3] if case.shape == "decoder" else [9, 4]
    close(together, (counts[0] * parts[0] + counts[1] * parts[1]) / sum(counts))


@each_component
def test_a_batch_counts_by_its_share_of_the_step(case):
    """Beside as many targets of other batches, as Trainer counts them, a loss is half of what it is alone: all of it,
    auxiliary parts included, and where padding is on the left, whose first tokens no token predicts."""
    model = case.build().train()
    for side in ("right", "left"):
        ids, mask = pad([tokens(9), tokens(5, seed=1)], 9, side)
        counted = ids.masked_fill(mask == 0, -100)[:, 1 if case.shape == "decoder" else 0 :] != -100
        found = []
        for more in ({}, {"num_items_in_batch": 2 * counted.sum()}):
            torch.manual_seed(0)  # dropout is on
            with torch.no_grad():
                found.append(output_of(copy.deepcopy(model), ids, mask, **more).loss)
        close(2 * found[1], found[0])


ADAPTED_SLOTS = ("feedforward", "block", "stack")


def adapted_parts(case):
    """Each component that has projections or runs what has them, and each shape: adapters find them by their names
    (tests/adapters has those of attention)."""
    return {(slot, name) for slot, name, _, _ in components(case) if slot in ADAPTED_SLOTS} | {case.shape}


@pytest.mark.parametrize("case", covering(CASES, adapted_parts), ids=str)
def test_lora(case, tmp_path):
    """Adapters train alone, merge into the weights, and come back on a fresh model."""
    model = case.build(dtype=torch.float32, **NO_DROPOUT)
    leaves = {name.rpartition(".")[2] for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
    targets = [name for name in ADAPTED if name in leaves] or [name for name in CANONICAL if name in leaves]
    assert targets, f"no projection has a canonical name: {sorted(leaves)}"
    untouched = copy.deepcopy(model)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    adapted = get_peft_model(model, LoraConfig(r=4, lora_alpha=8, target_modules=targets))
    ids, mask = pad([tokens(9), tokens(5, seed=1)], 9, "right")
    with torch.no_grad():
        close(case.run(adapted, ids, mask), case.run(untouched, ids, mask), 1e-5)  # B starts at zero
    trained = [parameter for parameter in adapted.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=2e-2)
    losses = []
    for _ in range(4):
        loss = loss_of(adapted.train(), ids, mask)
        optimizer.zero_grad()
        loss.backward()
        assert all(parameter.grad is not None for parameter in trained)
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0], losses
    for name, tensor in adapted.get_base_model().state_dict().items():
        if "lora_" not in name:
            assert torch.equal(tensor, before[name.replace("base_layer.", "")]), f"{name} was not frozen"

    adapted.eval()
    with torch.no_grad():
        expected = case.run(adapted, ids, mask)
        assert (expected - case.run(untouched, ids, mask)).abs().max() > 1e-4
        adapted.save_pretrained(tmp_path)
        again = PeftModel.from_pretrained(untouched, tmp_path)
        saved, kept = (get_peft_model_state_dict(each) for each in (again, adapted))
        assert saved.keys() == kept.keys() and all(torch.equal(saved[name], kept[name]) for name in kept)
        close(case.run(again.eval(), ids, mask), expected, 1e-5)  # sums depend on where weights lie in memory
        close(case.run(adapted.merge_and_unload(), ids, mask), expected, 1e-4)


@each_component
def test_short_texts_train(case):
    """A text of one or two tokens has a finite loss and gradient (a causal one of a single token has no target)."""
    model = case.shared()
    for length in (1, 2):
        loss = loss_of(model, tokens(2, length))
        assert loss.isfinite()
        found = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
        assert all(gradient.isfinite().all() for gradient in found if gradient is not None)
