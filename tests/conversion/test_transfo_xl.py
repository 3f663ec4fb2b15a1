"""Transformer-XL's published checkpoint, from files in its layout: against the paper's equations in float64."""

import json
import math
import pickle
from collections import Counter, OrderedDict

import pytest
import torch
from torch.nn import functional as F
from transformers import AutoTokenizer

from hf_xformers import XFTransformerXLForCausalLM
from hf_xformers.conversion import convert_checkpoint, from_transformers, swap_components, to_transformers
from tests.conversion.test_checkpoints import Code
from tests.helpers import close

VOCAB, WIDTH, EMBED, HEADS, HEAD, INNER, LAYERS, MEMORY, CLAMP = 40, 16, 12, 3, 4, 20, 2, 6, 4
BOUNDS, WIDTHS = [0, 10, 18, 40], [12, 6, 3]
CONFIG = {  # as in the published file, smaller
    "adaptive": True, "architectures": ["TransfoXLLMHeadModel"], "attn_type": 0, "clamp_len": CLAMP,
    "cutoffs": BOUNDS[1:-1], "d_embed": EMBED, "d_head": HEAD, "d_inner": INNER, "d_model": WIDTH, "div_val": 2,
    "dropatt": 0.0, "dropout": 0.1, "eos_token_id": 0, "ext_len": 0, "init": "normal", "init_range": 0.01,
    "init_std": 0.02, "layer_norm_epsilon": 1e-05, "mem_len": MEMORY, "model_type": "transfo-xl", "n_head": HEADS,
    "n_layer": LAYERS, "pre_lnorm": False, "proj_init_std": 0.01, "same_length": True, "sample_softmax": -1,
    "tgt_len": 8, "tie_projs": [False, True, True], "tie_weight": True, "untie_r": True, "vocab_size": VOCAB,
}  # fmt: skip


def checkpoint(folder, drop=(), **fields):
    """A folder with `pytorch_model.bin` in that layout; its tensors in float64."""
    torch.manual_seed(0)
    config = {**CONFIG, **fields}
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    state = {"transformer.pos_emb.inv_freq": 1 / 10000 ** (torch.arange(0.0, WIDTH, 2.0) / WIDTH)}
    for c, width in enumerate(WIDTHS):
        size = BOUNDS[c + 1] - BOUNDS[c]
        state[f"transformer.word_emb.emb_layers.{c}.weight"] = torch.randn(size, width)
        state[f"transformer.word_emb.emb_projs.{c}"] = 0.3 * torch.randn(WIDTH, width)
        state[f"crit.out_layers.{c}.weight"] = state[f"transformer.word_emb.emb_layers.{c}.weight"]
        state[f"crit.out_layers.{c}.bias"] = torch.randn(size)
        shares = config["tie_projs"][c]
        state[f"crit.out_projs.{c}"] = (
            state[f"transformer.word_emb.emb_projs.{c}"] if shares else 0.3 * torch.randn(WIDTH, width)
        )
    state["crit.cluster_weight"], state["crit.cluster_bias"] = torch.randn(2, EMBED), torch.randn(2)
    common = {name: torch.randn(HEADS, HEAD) for name in ("r_w_bias", "r_r_bias")}
    if not config["untie_r"]:
        state.update({f"transformer.{name}": tensor for name, tensor in common.items()})
    for i in range(LAYERS):
        part = f"transformer.layers.{i}"
        state[f"{part}.dec_attn.qkv_net.weight"] = 0.3 * torch.randn(3 * HEADS * HEAD, WIDTH)
        state[f"{part}.dec_attn.o_net.weight"] = 0.3 * torch.randn(WIDTH, HEADS * HEAD)
        state[f"{part}.dec_attn.r_net.weight"] = 0.3 * torch.randn(HEADS * HEAD, WIDTH)
        for name, tensor in common.items():
            state[f"{part}.dec_attn.{name}"] = torch.randn(HEADS, HEAD) if config["untie_r"] else tensor
        state[f"{part}.pos_ff.CoreNet.0.weight"] = 0.3 * torch.randn(INNER, WIDTH)
        state[f"{part}.pos_ff.CoreNet.0.bias"] = torch.randn(INNER)
        state[f"{part}.pos_ff.CoreNet.3.weight"] = 0.3 * torch.randn(WIDTH, INNER)
        state[f"{part}.pos_ff.CoreNet.3.bias"] = torch.randn(WIDTH)
        for norm in (f"{part}.dec_attn.layer_norm", f"{part}.pos_ff.layer_norm"):
            state[f"{norm}.weight"], state[f"{norm}.bias"] = torch.randn(WIDTH), torch.randn(WIDTH)
    torch.save({name: tensor for name, tensor in state.items() if name not in drop}, folder / "pytorch_model.bin")
    return {name: tensor.double() for name, tensor in state.items()}, config


def literal(state, config, ids, memory):
    """Log probabilities [B, T, V] of a segment, and the memory for the next: Dai et al. 2019, section 3.3, and Grave
    et al. 2017, equation by equation. memory: of each layer, states [B, M, D] of earlier tokens."""
    batch, length = ids.shape
    states = torch.zeros(batch, length, WIDTH, dtype=torch.float64)
    for row in range(batch):
        for place in range(length):
            word = int(ids[row, place])
            c = max(index for index in range(3) if BOUNDS[index] <= word)
            narrow = state[f"transformer.word_emb.emb_layers.{c}.weight"][word - BOUNDS[c]]
            states[row, place] = state[f"transformer.word_emb.emb_projs.{c}"] @ narrow * math.sqrt(WIDTH)
    kept = []
    for i in range(LAYERS):
        part = f"transformer.layers.{i}"
        keys_of = torch.cat([memory[i], states], dim=1)
        kept.append(keys_of[:, -config["mem_len"] :])
        earlier = memory[i].shape[1]
        query, key, value = (
            (keys_of @ weight.T).unflatten(-1, (HEADS, HEAD))
            for weight in state[f"{part}.dec_attn.qkv_net.weight"].chunk(3)
        )
        u, v = state[f"{part}.dec_attn.r_w_bias"], state[f"{part}.dec_attn.r_r_bias"]
        mixed = torch.zeros(batch, length, HEADS, HEAD, dtype=torch.float64)
        for here in range(length):
            scores, seen = [], []
            for there in range(earlier + length):
                distance = earlier + here - there
                if distance < 0 or (config["same_length"] and distance >= config["mem_len"]):
                    continue
                clamped = min(distance, config["clamp_len"]) if config["clamp_len"] > 0 else distance
                angles = clamped * state["transformer.pos_emb.inv_freq"]
                position = state[f"{part}.dec_attn.r_net.weight"] @ torch.cat([angles.sin(), angles.cos()])
                asked = query[:, earlier + here]
                content = ((asked + u) * key[:, there]).sum(-1)
                scores.append((content + ((asked + v) * position.view(HEADS, HEAD)).sum(-1)) / math.sqrt(HEAD))
                seen.append(value[:, there])
            weights = torch.stack(scores, -1).softmax(-1)
            mixed[:, here] = (weights[..., None] * torch.stack(seen, 2)).sum(2)
        mixed = mixed.flatten(2) @ state[f"{part}.dec_attn.o_net.weight"].T

        def norm(x, name, part=part):
            weights = (state[f"{part}.{name}.layer_norm.{end}"] for end in ("weight", "bias"))
            return F.layer_norm(x, (WIDTH,), *weights, 1e-5)

        states = norm(states + mixed, "dec_attn")
        inner, outer = (
            [state[f"{part}.pos_ff.CoreNet.{place}.{end}"] for end in ("weight", "bias")] for place in (0, 3)
        )
        states = norm(states + F.linear(F.linear(states, *inner).relu(), *outer), "pos_ff")
    chances = []
    for c in range(3):
        weight, bias = (state[f"crit.out_layers.{c}.{end}"] for end in ("weight", "bias"))
        if c == 0:
            weight = torch.cat([weight, state["crit.cluster_weight"]])
            bias = torch.cat([bias, state["crit.cluster_bias"]])
        chances.append((states @ state[f"crit.out_projs.{c}"] @ weight.T + bias).softmax(-1))
    first, *later = chances
    later = [first[..., BOUNDS[1] + c, None] * entry for c, entry in enumerate(later)]
    return torch.cat([first[..., : BOUNDS[1]], *later], -1).log(), kept


VARIATIONS = {
    "published": {},
    "shared biases": {"untie_r": False},
    "all keys": {"same_length": False, "clamp_len": -1},
    "own projections": {"tie_projs": [False, False, False]},
}


@torch.no_grad()
@pytest.mark.parametrize("fields", VARIATIONS.values(), ids=VARIATIONS)
def test_equals_the_equations(tmp_path, fields):
    """Three segments with their memory, and the loss."""
    state, config = checkpoint(tmp_path / "theirs", **fields)
    report = convert_checkpoint(tmp_path / "theirs", tmp_path / "ours")
    assert not report.new and report.dropped in ([], ["transformer.pos_emb.inv_freq"])
    model = XFTransformerXLForCausalLM.from_pretrained(tmp_path / "ours", dtype=torch.float64).eval()
    ids = torch.randint(0, VOCAB, (2, 15), generator=torch.Generator().manual_seed(1))
    memory, carried = [torch.zeros(2, 0, WIDTH, dtype=torch.float64)] * LAYERS, None
    for implementation in ("sdpa", "eager"):
        model.set_attn_implementation(implementation)
        memory, carried = [torch.zeros(2, 0, WIDTH, dtype=torch.float64)] * LAYERS, None
        for segment in ids.split(5, dim=1):
            expected, memory = literal(state, config, segment, memory)
            given = {} if carried is None else {"segment_memory": carried}
            output = model(input_ids=segment, labels=segment, use_cache=False, **given)
            carried = output.segment_memory
            close(output.logits, expected, 1e-6)
            losses = -expected[:, :-1].gather(-1, segment[:, 1:, None])
            close(output.loss, losses.mean(), 1e-6)


def test_heads_and_directions(tmp_path):
    checkpoint(tmp_path / "theirs")
    bare = from_transformers(tmp_path / "theirs", head="Model")
    assert type(bare).__name__ == "XFTransformerXLModel"
    with pytest.raises(ValueError, match="No conversion for model type 'xf_transformer_xl'"):
        to_transformers(bare)
    swapped, _ = swap_components(tmp_path / "theirs", feedforward="gelu", measure=False)
    assert swapped.config.feedforward.type == "gelu"


def test_files_without_the_tied_tensors(tmp_path):
    """Some files have only one name for what input and output share."""
    names = [f"crit.out_layers.{c}.weight" for c in range(3)] + ["crit.out_projs.1", "crit.out_projs.2"]
    checkpoint(tmp_path / "whole")
    checkpoint(tmp_path / "short", drop=(*names, "transformer.pos_emb.inv_freq"))
    whole, short = (from_transformers(tmp_path / name).state_dict() for name in ("whole", "short"))
    assert whole.keys() == short.keys() and all(torch.equal(whole[name], short[name]) for name in whole)


@pytest.mark.parametrize(
    ("fields", "drop", "message"),
    [
        ({}, ("crit.out_projs.0",), "lacks 'crit.out_projs.0'"),
        ({}, ("transformer.layers.1.dec_attn.r_net.weight",), "lacks 'transformer.layers.1.dec_attn.r_net.weight'"),
        ({"d_inner": 24}, (), "other sizes than its config.json says: 'transformer.layers.0.pos_ff"),
        ({"pre_lnorm": True}, (), "pre_lnorm=True does not convert"),
        ({"attn_type": 1}, (), "attn_type=1 does not convert"),
        ({"tie_projs": [True, False, True]}, (), "tie_projs=.* does not convert"),
    ],
)
def test_refusals(tmp_path, fields, drop, message):
    checkpoint(tmp_path / "theirs", drop=drop, **fields)
    with pytest.raises(ValueError, match=message):
        convert_checkpoint(tmp_path / "theirs", tmp_path / "ours")
    assert not (tmp_path / "ours").exists()


WORDS = ["<eos>", "the", "<unk>", ",", "The", "cat", *(f"word{index}" for index in range(6, VOCAB))]


def vocabulary(**more):
    return {
        "counter": Counter(WORDS), "special": ["<eos>"], "lower_case": False, "never_split": {"<eos>", "<unk>"},
        "idx2sym": WORDS, "sym2idx": OrderedDict((word, index) for index, word in enumerate(WORDS)), **more,
    }  # fmt: skip


@pytest.mark.parametrize("file", ["vocab.pkl", "vocab.bin"])
def test_words(tmp_path, file):
    checkpoint(tmp_path / "theirs")
    place = tmp_path / "theirs" / file
    if file == "vocab.bin":
        torch.save({**vocabulary(), "counter": dict(Counter(WORDS)), "never_split": list(WORDS[:2])}, place)
    else:
        place.write_bytes(pickle.dumps(vocabulary(), protocol=2))
    assert not convert_checkpoint(tmp_path / "theirs", tmp_path / "ours").notes
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "ours")
    assert tokenizer("The cat , the dog <eos>").input_ids == [4, 5, 3, 1, 2, 0]
    assert tokenizer.decode([4, 5, 3, 1, 0]) == "The cat , the <eos>"
    assert (len(tokenizer), tokenizer.eos_token_id, tokenizer.unk_token_id) == (VOCAB, 0, 2)


@pytest.mark.parametrize("file", ["vocab.pkl", "vocab.bin"])
def test_words_with_code(tmp_path, file):
    checkpoint(tmp_path / "theirs")
    place = tmp_path / "theirs" / file
    content = vocabulary(more=Code(tmp_path / "ran"))
    torch.save(content, place) if file == "vocab.bin" else place.write_bytes(pickle.dumps(content))
    for damage, message in ((None, "holds more than words and numbers .*open"), (b"\x80\x02nothing", "vocab"),
                            (pickle.dumps({"sym2idx": {"a": 3}}), "lists no words|vocab.bin")):  # fmt: skip
        if damage is not None:
            place.write_bytes(damage)
        with pytest.raises(ValueError, match=message):
            convert_checkpoint(tmp_path / "theirs", tmp_path / "ours")
    assert not (tmp_path / "ran").exists() and not (tmp_path / "ours").exists()
