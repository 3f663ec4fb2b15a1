"""Context and sequence parallelism: refused unless every component declares that it is right on a part of a text."""

import pytest
import torch
from accelerate import ParallelismConfig
from accelerate.state import AcceleratorState
from transformers import AutoConfig, AutoModelForCausalLM

from hf_xformers import XFormerConfig, XFormerForCausalLM, XFormerForSequenceClassification, XFormerModel
from hf_xformers.training.trainer import XFormerTrainer
from tests.helpers import NO_DROPOUT, close, make_strong, tokens

SMALL = dict(
    vocab_size=40, hidden_size=16, num_attention_heads=4, num_hidden_layers=2, intermediate_size=16, **NO_DROPOUT
)
PLACES = {"position_ids": torch.arange(6)[None]}


@pytest.fixture
def sharded(monkeypatch):
    """A process whose Accelerate divides texts, as a plain Trainer's does that is asked to."""

    def start(**sizes):
        monkeypatch.setitem(AcceleratorState._shared_state, "parallelism_config", ParallelismConfig(**sizes))

    return start


def build(model_class=XFormerForCausalLM, **fields):
    torch.manual_seed(0)
    return make_strong(model_class(XFormerConfig(**{**SMALL, **fields})).double().eval())


@pytest.mark.parametrize(
    ("fields", "part"),
    [
        ({"attention": "performer"}, "attention 'performer'"),
        ({"attention": "linear_transformer"}, "attention 'linear_transformer'"),
        ({"attention": "longformer"}, "attention 'longformer'"),
        ({"position": "t5_relative_bias"}, "position 't5_relative_bias'"),
        ({"feedforward": "switch_transformer"}, "feedforward 'switch_transformer'"),
        ({"normalization": "power_norm"}, "normalization 'power_norm'"),
        ({"block": "cpe"}, "block 'cpe'"),
        ({"per_layer_config": {1: {"attention": "band_attention"}}}, "attention 'band_attention'"),
    ],
)
def test_components_that_read_more_than_a_part(sharded, fields, part):
    model, ids = build(**fields), tokens(1, 6, high=40)
    assert not model.supports_context_parallel
    assert model(ids, **PLACES).logits.shape == (1, 6, 40)
    sharded(cp_size=2)
    with pytest.raises(ValueError, match=f"{part} reads more of a text than the part.*use data parallelism"):
        model(ids, **PLACES)


def test_what_else_is_refused(sharded):
    ids, causal, bare = tokens(1, 6, high=40), build(), build(XFormerModel)
    classifier = build(XFormerForSequenceClassification, is_decoder=True)
    assert causal.supports_context_parallel and not bare.supports_context_parallel
    sharded(cp_size=2)
    with pytest.raises(ValueError, match="only a causal decoder's order of tokens"):
        bare(ids)
    with pytest.raises(ValueError, match="which only a causal language model reads token by token"):
        classifier(ids)
    with pytest.raises(ValueError, match="give `position_ids`, divided like `input_ids`"):
        causal(ids)
    with pytest.raises(ValueError, match="give `shift_labels`"):
        causal(ids, labels=ids, **PLACES)
    with pytest.raises(ValueError, match="drops padding masks; give rows that are full of text"):
        causal(ids, attention_mask=torch.tensor([[0, 1, 1, 1, 1, 1]]), **PLACES)
    causal.set_attn_implementation("eager")
    with pytest.raises(ValueError, match="`attn_implementation` is 'eager'"):
        causal(ids, **PLACES)


def test_sequence_parallelism(sharded):
    model = build()
    sharded(sp_size=2, sp_backend="deepspeed")
    with pytest.raises(ValueError, match="DeepSpeed's sequence parallelism exchanges heads"):
        model(tokens(1, 6, high=40), **PLACES)


def test_our_trainer_refuses_at_once(monkeypatch, tmp_path):
    from transformers import TrainingArguments

    monkeypatch.setattr("hf_xformers.training.trainer.sharding_in_force", lambda: "context")
    arguments = TrainingArguments(str(tmp_path), report_to="none", use_cpu=True)
    with pytest.raises(ValueError, match="attention 'performer' reads more"):
        XFormerTrainer(model=build(attention="performer"), args=arguments)


@pytest.mark.parametrize("position", ["learned_absolute", "rotary"])
@pytest.mark.parametrize("places", [[0, 1, 6, 7, 2, 3, 4, 5], [0, 1, 2, 3, 4, 5, 6, 7]], ids=["balanced", "in_order"])
def test_parts_make_the_whole(sharded, monkeypatch, position, places):
    """Two processes, played by two rows of a batch: with SDPA exchanging keys and values in the order of their places,
    as torch's ring does, all else of a dense causal model gives each token what it gets in the whole text."""
    model, ids = build(position=position), tokens(1, 8, high=40)
    labels = torch.cat([ids[:, 1:], torch.full((1, 1), -100)], 1)
    whole = model(ids, labels=ids)
    plain, place = torch.nn.functional.scaled_dot_product_attention, torch.tensor(places)

    def ring(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, **more):
        assert attn_mask is None and is_causal
        joined = [part.transpose(0, 1).flatten(1, 2)[None] for part in (query, key, value)]
        output = plain(*joined, attn_mask=place[:, None] >= place[None], **more)
        return output.unflatten(2, (2, 4))[0].transpose(0, 1)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", ring)
    sharded(cp_size=2)
    parts = model(
        ids[:, place].view(2, 4),
        position_ids=place.view(2, 4),
        shift_labels=labels[:, place].view(2, 4),
        use_cache=None,
    )
    close(parts.logits.reshape(8, 40), whole.logits[0, place])
    close(parts.loss, whole.loss)


def test_families_answer():
    """transformers' own question gets an answer from what a model is made of."""
    for name, expected in (("xf_gpt2", True), ("xf_performer", False), ("xf_delta_net", False)):
        config = AutoConfig.for_model(
            name, num_hidden_layers=1, hidden_size=16, num_attention_heads=4, head_dim=None, vocab_size=40
        )
        assert AutoModelForCausalLM.from_config(config).supports_context_parallel is expected
