"""NEZHA and ERNIE-M, from files in the layouts that transformers 4 wrote: against their equations in float64."""

import json
import math

import pytest
import torch
from safetensors.torch import save_file
from torch.nn import functional as F

from hf_xformers.conversion import convert_checkpoint, from_transformers, to_transformers
from tests.helpers import close

VOCAB, WIDTH, HEADS, INNER, LAYERS, LONGEST, REACH = 40, 24, 3, 20, 2, 12, 3
D = WIDTH // HEADS
COMMON = {
    "attention_probs_dropout_prob": 0.1, "classifier_dropout": None, "hidden_act": "gelu", "hidden_dropout_prob": 0.1,
    "hidden_size": WIDTH, "initializer_range": 0.02, "intermediate_size": INNER, "num_attention_heads": HEADS,
    "num_hidden_layers": LAYERS, "vocab_size": VOCAB,
}  # fmt: skip
CONFIGS = {
    "nezha": {
        **COMMON, "bos_token_id": 2, "eos_token_id": 3, "layer_norm_eps": 1e-12, "max_position_embeddings": LONGEST,
        "max_relative_position": REACH, "model_type": "nezha", "pad_token_id": 0, "type_vocab_size": 2,
        "use_cache": True, "use_relative_position": True,
    },
    "ernie_m": {
        **COMMON, "act_dropout": 0.0, "layer_norm_eps": 1e-05, "max_position_embeddings": LONGEST + 2,
        "model_type": "ernie_m", "pad_token_id": 1, "paddlenlp_version": None, "type_vocab_size": 16,
    },
}  # fmt: skip
# Of each layer: projections and norms by the names that the text below has for them.
NAMES = {
    "nezha": {
        "q": "attention.self.query", "k": "attention.self.key", "v": "attention.self.value",
        "o": "attention.output.dense", "norm1": "attention.output.LayerNorm", "up": "intermediate.dense",
        "down": "output.dense", "norm2": "output.LayerNorm",
    },
    "ernie_m": {
        "q": "self_attn.self_attn.q_proj", "k": "self_attn.self_attn.k_proj", "v": "self_attn.self_attn.v_proj",
        "o": "self_attn.out_proj", "norm1": "norm1", "up": "linear1", "down": "linear2", "norm2": "norm2",
    },
}  # fmt: skip
LAYER = {"nezha": "encoder.layer", "ernie_m": "encoder.layers"}
NORM = {"nezha": "embeddings.LayerNorm", "ernie_m": "embeddings.layer_norm"}
EPSILON = {name: config["layer_norm_eps"] for name, config in CONFIGS.items()}
POOLED = ("ForPreTraining", "ForSequenceClassification", "ForMultipleChoice", "ForNextSentencePrediction", "Model")
STEM = {"nezha": "Nezha", "ernie_m": "ErnieM"}


def sinusoid(distance):
    """a_ij of NEZHA, section 2.1: of the clipped distance j - i, counted from 0."""
    place = max(-REACH, min(REACH, distance)) + REACH
    angles = [place / 10000 ** (2 * k / D) for k in range(D // 2)]
    return torch.tensor([f(x) for x in angles for f in (math.sin, math.cos)], dtype=torch.float64)


def checkpoint(folder, kind, head="Model", drop=(), file="bin", **fields):
    """A folder in that layout; its tensors in float64, by the bare model's names where they are its."""
    torch.manual_seed(0)
    weights = {"embeddings.word_embeddings.weight": torch.randn(VOCAB, WIDTH)}

    def linear(name, outputs, inputs):
        weights[f"{name}.weight"], weights[f"{name}.bias"] = 0.3 * torch.randn(outputs, inputs), torch.randn(outputs)

    def norm(name):
        weights[f"{name}.weight"], weights[f"{name}.bias"] = torch.randn(WIDTH), torch.randn(WIDTH)

    norm(NORM[kind])
    if kind == "nezha":
        weights["embeddings.token_type_embeddings.weight"] = torch.randn(2, WIDTH)
    else:
        weights["embeddings.position_embeddings.weight"] = torch.randn(LONGEST + 2, WIDTH)
    sizes = {"up": (INNER, WIDTH), "down": (WIDTH, INNER)}
    for i in range(LAYERS):
        for short, name in NAMES[kind].items():
            place = f"{LAYER[kind]}.{i}.{name}"
            norm(place) if "norm" in short else linear(place, *sizes.get(short, (WIDTH, WIDTH)))
        if kind == "nezha":
            table = [[sinusoid(j - i).float() for j in range(LONGEST)] for i in range(LONGEST)]
            encoding = torch.stack([torch.stack(row) for row in table])
            weights[f"{LAYER[kind]}.{i}.attention.self.relative_positions_encoding.positions_encoding"] = encoding
    if head in POOLED:
        linear("pooler.dense", WIDTH, WIDTH)
    base = "" if head == "Model" else f"{kind}."
    weights = {base + name: tensor for name, tensor in weights.items()}
    if head in ("ForPreTraining", "ForMaskedLM"):
        linear("cls.predictions.transform.dense", WIDTH, WIDTH)
        norm("cls.predictions.transform.LayerNorm")
        linear("cls.predictions.decoder", VOCAB, WIDTH)
        weights["cls.predictions.decoder.weight"] = weights[f"{base}embeddings.word_embeddings.weight"].clone()
        weights["cls.predictions.bias"] = weights["cls.predictions.decoder.bias"].clone()
    if head in ("ForPreTraining", "ForNextSentencePrediction"):
        linear("cls.seq_relationship", 2, WIDTH)
    if head in ("ForSequenceClassification", "ForTokenClassification", "ForMultipleChoice"):
        linear("classifier", 1 if head == "ForMultipleChoice" else 2, WIDTH)
    if head == "ForQuestionAnswering":
        linear("qa_outputs", 2, WIDTH)
    if head == "ForInformationExtraction":
        linear("pooler.dense", WIDTH, WIDTH)
        for end in ("weight", "bias"):
            weights[f"{base}pooler.dense.{end}"] = weights.pop(f"pooler.dense.{end}")
        linear("linear_start", 1, WIDTH)
        linear("linear_end", 1, WIDTH)
    folder.mkdir(exist_ok=True)
    config = {**CONFIGS[kind], "architectures": [STEM[kind] + head], **fields}
    (folder / "config.json").write_text(json.dumps(config))
    kept = {name: tensor.contiguous() for name, tensor in weights.items() if name not in drop}
    if file == "bin":
        torch.save(kept, folder / "pytorch_model.bin")
    else:
        save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    return {name.removeprefix(base): tensor.double() for name, tensor in weights.items()}


def literal(weights, kind, ids, mask, types):
    """States [B, T, D] by loops over pairs: Wei et al. 2019, eqs. 1 to 5, and BERT with absolute positions."""

    def linear(x, name):
        return x @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]

    def norm(x, name):
        return F.layer_norm(x, (WIDTH,), weights[f"{name}.weight"], weights[f"{name}.bias"], EPSILON[kind])

    length = ids.shape[1]
    states = weights["embeddings.word_embeddings.weight"][ids]
    if kind == "nezha":
        states = states + weights["embeddings.token_type_embeddings.weight"][types]
    else:
        states = states + weights["embeddings.position_embeddings.weight"][2 : 2 + length]
    states = norm(states, NORM[kind])
    for i in range(LAYERS):
        part = {short: f"{LAYER[kind]}.{i}.{name}" for short, name in NAMES[kind].items()}
        q, k, v = (linear(states, part[x]).unflatten(-1, (HEADS, D)) for x in "qkv")
        mixed = torch.zeros_like(q)
        for b in range(len(ids)):
            seen = [j for j in range(length) if mask[b, j]]
            for t in range(length):
                vectors = [sinusoid(j - t) if kind == "nezha" else torch.zeros(D).double() for j in seen]
                for h in range(HEADS):
                    scores = [q[b, t, h] @ (k[b, j, h] + a) / math.sqrt(D) for j, a in zip(seen, vectors)]
                    chances = torch.stack(scores).softmax(0)
                    mixed[b, t, h] = sum(w * (v[b, j, h] + a) for w, j, a in zip(chances, seen, vectors))
        states = norm(states + linear(mixed.flatten(2), part["o"]), part["norm1"])
        states = norm(states + linear(F.gelu(linear(states, part["up"])), part["down"]), part["norm2"])
    return states


def inputs():
    ids = torch.randint(5, VOCAB, (2, 9), generator=torch.Generator().manual_seed(1))
    mask = (torch.arange(9) < torch.tensor([9, 6])[:, None]).long()
    return {"input_ids": ids, "attention_mask": mask}, (torch.arange(9) > 4).long().expand(2, 9)


@torch.no_grad()
@pytest.mark.parametrize(("kind", "file"), [("nezha", "bin"), ("nezha", "safetensors"), ("ernie_m", "bin")])
def test_equals_the_equations(tmp_path, kind, file):
    weights = checkpoint(tmp_path / "theirs", kind, file=file)
    report = convert_checkpoint(tmp_path / "theirs", tmp_path / "ours")
    encodings = [f"encoder.layer.{i}.attention.self.relative_positions_encoding.positions_encoding" for i in (0, 1)]
    assert not report.new and sorted(report.dropped) == (encodings if kind == "nezha" else [])
    given, types = inputs()
    expected = literal(weights, kind, given["input_ids"], given["attention_mask"], types)
    mask = given["attention_mask"].bool()
    given |= {"token_type_ids": types} if kind == "nezha" else {}
    model = from_transformers(tmp_path / "theirs").double().eval()
    assert model.config.model_type == "xf_bert"
    for implementation in ("sdpa", "eager"):
        model.set_attn_implementation(implementation)
        output = model(**given)
        # tables of sinusoids are made in the checkpoint's precision
        close(output.last_hidden_state[mask], expected[mask], 1e-5 if kind == "nezha" else 1e-9)
        pooled = torch.tanh(expected[:, 0] @ weights["pooler.dense.weight"].T + weights["pooler.dense.bias"])
        close(output.pooler_output, pooled, 1e-5 if kind == "nezha" else 1e-9)


HEADED = {
    "nezha": [
        *("ForPreTraining", "ForMaskedLM", "ForNextSentencePrediction", "ForSequenceClassification"),
        *("ForTokenClassification", "ForQuestionAnswering", "ForMultipleChoice"),
    ],
    "ernie_m": [
        *("ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering", "ForMultipleChoice"),
        "ForInformationExtraction",
    ],
}


@torch.no_grad()
@pytest.mark.parametrize(("kind", "head"), [(kind, head) for kind, heads in HEADED.items() for head in heads])
def test_heads(tmp_path, kind, head):
    weights = checkpoint(tmp_path, kind, head)
    model = from_transformers(tmp_path).double().eval()
    given, types = inputs()
    expected = literal(weights, kind, given["input_ids"], given["attention_mask"], types)
    mask = given["attention_mask"].bool()
    given |= {"token_type_ids": types} if kind == "nezha" else {}

    def linear(x, name):
        return x @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]

    if head == "ForInformationExtraction":
        assert type(model).__name__ == "XFBertModel"
        close(model(**given).last_hidden_state[mask], expected[mask], 1e-9)
        return
    assert type(model).__name__ == f"XFBert{head}"
    pooled = torch.tanh(linear(expected[:, 0], "pooler.dense")) if head in POOLED else None
    if head == "ForMultipleChoice":
        found = model(**{name: x[None] for name, x in given.items()})
        close(found.logits[0], linear(pooled, "classifier")[:, 0], 1e-5)
        return
    found = model(**given)
    if head in ("ForPreTraining", "ForMaskedLM"):
        hidden = F.gelu(linear(expected, "cls.predictions.transform.dense"))
        ends = (weights[f"cls.predictions.transform.LayerNorm.{end}"] for end in ("weight", "bias"))
        hidden = F.layer_norm(hidden, (WIDTH,), *ends, EPSILON[kind])
        logits = found.logits if head == "ForMaskedLM" else found.prediction_logits
        close(logits[mask], linear(hidden, "cls.predictions.decoder")[mask], 1e-5)
    if head == "ForPreTraining":
        close(found.seq_relationship_logits, linear(pooled, "cls.seq_relationship"), 1e-5)
    if head == "ForNextSentencePrediction":
        close(found.logits, linear(pooled, "cls.seq_relationship"), 1e-5)
    if head == "ForSequenceClassification":
        close(found.logits, linear(pooled, "classifier"), 1e-5)
    if head == "ForTokenClassification":
        close(found.logits[mask], linear(expected, "classifier")[mask], 1e-5)
    if head == "ForQuestionAnswering":
        both = torch.stack([found.start_logits, found.end_logits], -1)
        close(both[mask], linear(expected, "qa_outputs")[mask], 1e-5)


@pytest.mark.parametrize("kind", HEADED)
def test_one_way(tmp_path, kind):
    checkpoint(tmp_path, kind)
    model = from_transformers(tmp_path)
    with pytest.raises(ValueError, match="no counterpart of model type"):
        to_transformers(model, model_type=kind)


def test_files_without_what_can_be_made(tmp_path):
    """Sinusoids are computed; tied tensors may have one name."""
    drop = ("cls.predictions.decoder.weight", "cls.predictions.decoder.bias")
    names = tuple(
        f"nezha.encoder.layer.{i}.attention.self.relative_positions_encoding.positions_encoding" for i in (0, 1)
    )
    for name, left_out in (("whole", ()), ("short", (*drop, *names))):
        checkpoint(tmp_path / name, "nezha", "ForMaskedLM", drop=left_out)
    whole, short = (from_transformers(tmp_path / name).state_dict() for name in ("whole", "short"))
    assert whole.keys() == short.keys() and all(torch.equal(whole[name], short[name]) for name in whole)


@pytest.mark.parametrize(
    ("kind", "fields", "drop", "message"),
    [
        ("nezha", {}, ("encoder.layer.1.output.dense.weight",), "lacks 'encoder.layer.1.output.dense.weight'"),
        ("nezha", {"hidden_act": "mish"}, (), "activation 'mish'"),
        ("nezha", {"intermediate_size": 8}, (), "other sizes than its config.json says"),
        ("nezha", {"num_attention_heads": 8}, (), "heads of width 3 does not convert"),
        ("ernie_m", {}, ("encoder.layers.0.norm2.bias",), "lacks 'encoder.layers.0.norm2.bias'"),
        ("ernie_m", {"max_position_embeddings": 9}, (), "other sizes than its config.json says"),
        ("ernie_m", {"position_embedding_type": "relative_key"}, (), "relative_key' does not convert"),
    ],
)
def test_refusals(tmp_path, kind, fields, drop, message):
    checkpoint(tmp_path / "theirs", kind, drop=drop, **fields)
    with pytest.raises(ValueError, match=message):
        convert_checkpoint(tmp_path / "theirs", tmp_path / "ours")
    assert not (tmp_path / "ours").exists()
