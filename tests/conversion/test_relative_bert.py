"""BERT checkpoints with relative positions, whose tables transformers 5 leaves behind: against the equation, written
out in float64."""

import json
import math

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch.nn import functional as F

from hf_xformers import XFBertModel
from hf_xformers.conversion import convert_checkpoint, from_transformers, to_transformers
from tests.helpers import close

LENGTH, LONGEST, HEADS, WIDTH = 9, 12, 4, 32


def checkpoint(folder, kind, model_class="BertForMaskedLM", file="safetensors", **fields):
    """A folder as transformers 4 wrote it: a table for each layer, and the idle one of absolute positions."""
    torch.manual_seed(0)
    config_class = getattr(transformers, model_class).config_class
    sizes = dict(vocab_size=60, hidden_size=WIDTH, num_hidden_layers=2, num_attention_heads=HEADS)
    model = getattr(transformers, model_class)(
        config_class(**sizes, intermediate_size=48, max_position_embeddings=LONGEST, hidden_act="gelu", **fields)
    )
    for tensor in model.parameters():
        tensor.data.add_(0.2 * torch.randn_like(tensor))
    model.save_pretrained(folder)
    weights = load_file(folder / "model.safetensors")
    for layer in range(2):
        name = f"{model.base_model_prefix}.encoder.layer.{layer}.attention.self.distance_embedding.weight"
        weights[name] = torch.randn(2 * LONGEST - 1, WIDTH // HEADS)
    if file == "safetensors":
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    else:
        (folder / "model.safetensors").unlink()
        torch.save(weights, folder / "pytorch_model.bin")
    saved = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**saved, "position_embedding_type": kind}))
    return {name.removeprefix("bert."): tensor.double() for name, tensor in weights.items()}


def literal(weights, ids, mask, kind, causal=False):
    """score_lr = (q_l k_r + q_l R_(l-r) [+ k_r R_(l-r)]) / sqrt(d): transformers 4.57, `BertSelfAttention`."""

    def linear(states, name):
        return states @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]

    def norm(states, name):
        return F.layer_norm(states, (WIDTH,), weights[f"{name}.weight"], weights[f"{name}.bias"], 1e-12)

    def heads(states):
        return states.unflatten(-1, (HEADS, -1)).transpose(1, 2)

    types = weights["embeddings.token_type_embeddings.weight"][0]
    states = norm(weights["embeddings.word_embeddings.weight"][ids] + types, "embeddings.LayerNorm")
    for layer in range(2):
        part = f"encoder.layer.{layer}"
        query, key, value = (
            heads(linear(states, f"{part}.attention.self.{name}")) for name in ("query", "key", "value")
        )
        scores = query @ key.mT
        table = weights[f"{part}.attention.self.distance_embedding.weight"]
        for left in range(LENGTH):
            for right in range(LENGTH):
                vector = table[left - right + LONGEST - 1]
                scores[:, :, left, right] += query[:, :, left] @ vector
                if kind == "relative_key_query":
                    scores[:, :, left, right] += key[:, :, right] @ vector
        hidden = ~mask[:, None, None].bool().expand_as(scores)
        if causal:
            hidden = hidden | torch.ones(LENGTH, LENGTH).triu(1).bool()
        chances = (scores / math.sqrt(WIDTH // HEADS)).masked_fill(hidden, -math.inf).softmax(-1)
        mixed = (chances @ value).transpose(1, 2).flatten(2)
        states = norm(linear(mixed, f"{part}.attention.output.dense") + states, f"{part}.attention.output.LayerNorm")
        inner = F.gelu(linear(states, f"{part}.intermediate.dense"))
        states = norm(linear(inner, f"{part}.output.dense") + states, f"{part}.output.LayerNorm")
    return states


def inputs():
    ids = torch.randint(5, 60, (3, LENGTH), generator=torch.Generator().manual_seed(1))
    return ids, (torch.arange(LENGTH) < torch.tensor([9, 6, 2])[:, None]).long()


@torch.no_grad()
@pytest.mark.parametrize("kind", ["relative_key", "relative_key_query"])
@pytest.mark.parametrize(
    ("model_class", "file", "head"),
    [
        ("BertForMaskedLM", "safetensors", None),
        ("BertForMaskedLM", "bin", "Model"),
        ("BertLMHeadModel", "safetensors", None),
    ],
)
def test_equals_the_equation(tmp_path, kind, model_class, file, head):
    causal = model_class == "BertLMHeadModel"
    weights = checkpoint(tmp_path, kind, model_class, file, is_decoder=causal)
    ids, mask = inputs()
    expected = literal(weights, ids, mask, kind, causal)[mask.bool()]
    model = from_transformers(tmp_path, head=head).double().eval()
    assert model.config.position.type == "shaw_relative" and model.config.model_type == "xf_bert"
    base = model if head == "Model" else model.model
    for implementation in ("sdpa", "eager"):
        model.set_attn_implementation(implementation)
        close(base(input_ids=ids, attention_mask=mask).last_hidden_state[mask.bool()], expected, 1e-9)


@torch.no_grad()
def test_folders(tmp_path):
    """What is written is read again, and there is no way back."""
    weights = checkpoint(tmp_path / "theirs", "relative_key")
    report = convert_checkpoint(tmp_path / "theirs", tmp_path / "ours")
    assert report.dropped == ["bert.embeddings.position_embeddings.weight"] and not report.new
    ids, mask = inputs()
    model = XFBertModel.from_pretrained(tmp_path / "ours").double().eval()
    expected = literal(weights, ids, mask, "relative_key")[mask.bool()]
    close(model(input_ids=ids, attention_mask=mask).last_hidden_state[mask.bool()], expected, 1e-9)
    with pytest.raises(ValueError, match="position='shaw_relative'.* has no counterpart"):
        to_transformers(model)


def test_refusals(tmp_path):
    checkpoint(tmp_path / "bert", "relative_key")
    loaded = transformers.BertForMaskedLM.from_pretrained(tmp_path / "bert")
    with pytest.raises(ValueError, match="distance_embedding.* give the folder or Hub id in place"):
        from_transformers(loaded)
    checkpoint(tmp_path / "other", "relative_query")
    with pytest.raises(ValueError, match="position_embedding_type='relative_query' does not convert"):
        from_transformers(tmp_path / "other")
    for model_class, kind in (("ElectraModel", "relative_key"), ("AlbertModel", "relative_key_query")):
        model = getattr(transformers, model_class).config_class(
            vocab_size=9, hidden_size=8, num_attention_heads=2, num_hidden_layers=1, intermediate_size=8
        )
        model.position_embedding_type = kind
        with pytest.raises(ValueError, match=f"position_embedding_type='{kind}' does not convert"):
            from_transformers(getattr(transformers, model_class)(model))
