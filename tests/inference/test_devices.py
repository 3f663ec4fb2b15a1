"""What a GPU would be waited for, and what would be copied to it, on machines without one."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM

import hf_xformers  # noqa: F401
from tests.pretend_cuda import OnGPU, on_gpu, pretend_cuda

# One of each way to mix tokens and to place them, and what kept constants on the host before.
DECODERS = (
    "gpt2",
    "linear_transformer",
    "performer",
    "delta_net",
    "floater",
    "roformer",
    "shaw_relative",
    "transformer_xl",
)
ENCODERS = ("bert", "reformer", "bp_transformer", "universal_transformer", "hard_coded_gaussian", "product_key_memory")
SIZES = {"vocab_size": 50, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
SIZES |= {"intermediate_size": 64, "max_position_embeddings": 128}


def model_of(name, head, **more):
    torch.manual_seed(0)
    model = head.from_config(AutoConfig.for_model(f"xf_{name}", **SIZES, **more))
    return on_gpu(model)


def batch(left):
    """Ids and mask of two rows, of which one is padded."""
    mask = (torch.arange(24)[None] >= torch.tensor([[0], [5]])).long()
    return OnGPU(torch.randint(5, 50, (2, 24))), OnGPU(mask if left else mask.flip(1))


def own(counter):
    """What happened in lines of this package."""
    return {name: count for name, count in counter.items() if "transformers/" not in name}


@pytest.mark.parametrize("name", DECODERS)
def test_a_generated_token_waits_for_its_mask_alone_and_copies_nothing(name, monkeypatch):
    """Two looks at the mask, both before any layer runs: whether anything is padded, and whether between tokens.
    transformers waits once itself, to see whether all texts are done."""
    with pretend_cuda(monkeypatch) as log:
        model = model_of(name, AutoModelForCausalLM, is_decoder=True).eval()
        ids, mask = batch(left=True)
        options = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        seen = []
        for count in (2, 2, 4):  # the first fills what is kept
            log.clear()
            with torch.no_grad():
                model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=count, **options)
            seen.append((own(log.waits), own(log.copies)))
            assert not own(log.mixed)
    _, (few_waits, few_copies), (waits, copies) = seen
    assert sum(waits.values()) - sum(few_waits.values()) <= 4, waits
    assert sum(copies.values()) <= sum(few_copies.values()), copies


@pytest.mark.parametrize("name", DECODERS + ENCODERS)
def test_a_training_step_copies_nothing(name, monkeypatch):
    causal = name in DECODERS
    head = AutoModelForCausalLM if causal else AutoModelForMaskedLM
    with pretend_cuda(monkeypatch) as log:
        model = model_of(name, head, **({"is_decoder": True} if causal else {})).train()
        ids, mask = batch(left=False)
        for _ in range(2):  # constants are copied once
            log.clear()
            model(input_ids=ids, attention_mask=mask, labels=ids).loss.backward()
        assert not own(log.copies) and not own(log.mixed)
        layers = model.config.num_hidden_layers
        assert all(count < layers for count in own(log.waits).values()), log.waits


@pytest.mark.parametrize("name", ["gpt2", "roformer", "linear_transformer"])
def test_positions_of_a_step_are_not_read_back(name, monkeypatch):
    with pretend_cuda(monkeypatch) as log, torch.no_grad():
        model = model_of(name, AutoModelForCausalLM, is_decoder=True).eval()
        ids, _ = batch(left=False)
        cache = model(input_ids=ids, use_cache=True).past_key_values
        log.clear()
        place = OnGPU(torch.full((2, 1), 24))
        model(input_ids=ids[:, :1], position_ids=place, past_key_values=cache, use_cache=True)
        assert not own(log.waits), log.waits
