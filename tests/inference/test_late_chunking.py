"""Vectors of passages from one pass, against literal means over tokens that are counted word by word."""

import random

import pytest
import torch
from transformers import RobertaConfig, RobertaModel

from hf_xformers.inference import late_chunks, pool_spans
from tests.clients.checkpoints import TEXTS, build, save, tokenizer
from tests.helpers import close

WORDS = " ".join(TEXTS).split()
LONG = WORDS[:20]
NARROW = {"num_hidden_layers": 1, "attention": {"type": "longformer", "attention_window": 2}, "position": "none"}


def places(words, sizes):
    """Spans in characters of consecutive passages with so many words, and their tokens, counted without offsets and
    without special tokens."""
    characters, pieces, word = [], [], 0
    for size in sizes:
        before, upto = " ".join(words[:word]), " ".join(words[: word + size])
        characters.append((len(before), len(upto)))  # with the space before it
        counts = [len(tokenizer().tokenize(one)) for one in words]
        pieces.append((sum(counts[:word]), sum(counts[: word + size])))
        word += size
    return characters, pieces


def states_of(model, text):
    with torch.no_grad():
        return model(tokenizer()(text, return_tensors="pt").input_ids).last_hidden_state[0]


@pytest.mark.parametrize("side", ["left", "right", "middle"])
def test_pool_spans(side):
    """Rows of 5 and 9 tokens among 12, by a loop over tokens in float64."""
    torch.manual_seed(0)
    states = torch.randn(2, 12, 3, dtype=torch.float64, requires_grad=True)
    slots = {"left": (range(7, 12), range(3, 12)), "right": (range(5), range(9))}
    slots["middle"] = ([0, 3, 4, 8, 11], [0, 1, 2, 5, 6, 7, 9, 10, 11])
    mask = torch.zeros(2, 12, dtype=torch.long)
    for row, own in enumerate(slots[side]):
        mask[row, list(own)] = 1
    spans = [[(0, 5), (1, 2)], [(2, 9), (0, 4), (3, 5)]]
    found = pool_spans(states, mask, spans)
    for row, own in enumerate(spans):
        for vector, (start, end) in zip(found[row], own):
            total = sum(states[row, list(slots[side][row])[place]] for place in range(start, end))
            close(vector, total / (end - start))
    torch.cat(found).sum().backward()
    assert not states.grad[mask == 0].any() and states.grad[mask == 1].all()


@pytest.mark.parametrize("name", ["xf_longformer", "xf_bert", "xf_funnel_transformer"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_encoders(name, side, monkeypatch):
    """Texts of several lengths in a batch; special tokens go with the first and the last token."""
    model = build(name, "Model").double()
    monkeypatch.setattr(tokenizer(), "padding_side", side)
    texts, spans, wanted = [], [], []
    for words, sizes in ((WORDS[:12], (5, 4, 3)), (WORDS[3:7], (2, 2)), (WORDS[9:17], (8,))):
        characters, pieces = places(words, sizes)
        states = states_of(model, " ".join(words))
        edges = [(start + 1, end + 1) for start, end in pieces]
        edges[0], edges[-1] = (0, edges[0][1]), (edges[-1][0], len(states))
        if len(sizes) == 1:
            edges = [(0, len(states))]
        texts.append(" ".join(words))
        spans.append(characters)
        wanted.append(torch.stack([states[start:end].mean(0) for start, end in edges]))
    for size in (1, 3):
        for vectors, rows in zip(late_chunks(model, texts, spans, tokenizer=tokenizer(), batch_size=size), wanted):
            close(vectors, rows)


def test_a_passage_knows_its_window():
    """One layer in which a token sees one neighbour: a word moves the passages that have it or stand beside it."""
    model = build("xf_longformer", "Model", **NARROW)
    sizes = (4, 1, 6, 9)
    _, pieces = places(LONG, sizes)

    def vectors(words):
        return late_chunks(model, [" ".join(words)], [places(words, sizes)[0]], tokenizer=tokenizer())[0]

    before = vectors(LONG)
    single = [word for word in dict.fromkeys(WORDS) if len(tokenizer().tokenize(word)) == 1]
    tried = 0
    for place, word in enumerate(LONG):
        if word not in single:
            continue
        other = random.Random(place).choice([one for one in single if one != word])
        token = sum(len(tokenizer().tokenize(one)) for one in LONG[:place])
        moved = (vectors([*LONG[:place], other, *LONG[place + 1 :]]) - before).abs().amax(-1) > 0
        assert moved.tolist() == [start - 1 <= token <= end for start, end in pieces]
        tried += 1
    assert tried > 8


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    package = pytest.importorskip("sentence_transformers")
    from sentence_transformers.sentence_transformer import modules

    folder = tmp_path_factory.mktemp("encoder")
    transformer = modules.Transformer(save(build("xf_longformer", "Model", hidden_dropout_prob=0.3), "Model", folder))
    pooling = modules.Pooling(transformer.get_embedding_dimension(), pooling_mode="mean")
    torch.manual_seed(0)
    dense = modules.Dense(transformer.get_embedding_dimension(), 8)
    return package.SentenceTransformer(modules=[transformer, pooling, dense, modules.Normalize()], device="cpu").eval()


def test_a_whole_text_has_its_own_vector(encoder):
    encoder.train()  # no dropout all the same
    found = late_chunks(encoder, TEXTS, [[(0, len(text))] for text in TEXTS], batch_size=4)
    close(torch.cat(found), encoder.encode(TEXTS, convert_to_tensor=True), 1e-6)


def test_literal(encoder):
    """Mean, linear map, tanh and length 1 of the states that sentence-transformers gives."""
    characters, pieces = places(WORDS[:12], (5, 4, 3))
    text = " ".join(WORDS[:12])
    states = encoder.encode(text, output_value="token_embeddings").double()
    weight, bias = encoder[2].linear.weight.double(), encoder[2].linear.bias.double()
    edges = [(0, pieces[0][1] + 1), (pieces[1][0] + 1, pieces[1][1] + 1), (pieces[2][0] + 1, len(states))]
    wanted = [torch.tanh(weight @ states[start:end].mean(0) + bias) for start, end in edges]
    found = late_chunks(encoder, [text, "rain fell"], [characters, []], batch_size=2)
    close(found[0].double(), torch.stack([vector / vector.norm() for vector in wanted]), 1e-6)
    assert found[1].shape == (0, 8)


def test_one_token_makes_the_vector(encoder):
    from sentence_transformers.sentence_transformer import modules

    first = type(encoder)(modules=[encoder[0], modules.Pooling(32, pooling_mode="cls")], device="cpu")
    with pytest.raises(TypeError, match="cls"):
        late_chunks(first, ["rain fell"], [[(0, 4)]])


def test_how_long_a_text_may_be(monkeypatch):
    """As positions say where they have an end; RoBERTa's table has two more places than it reads tokens."""
    words, limit = tokenizer(), build("xf_bert", "Model").config.max_position_embeddings
    monkeypatch.setattr(words, "model_max_length", limit)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    roberta = RobertaConfig(vocab_size=len(words), max_position_embeddings=limit + 2, **sizes)
    for model, said in (
        (build("xf_bert", "Model"), f"sequence has {limit + 1} tokens"),
        (RobertaModel(roberta), f"text 0 has {limit + 1} tokens and the model reads {limit};"),
        (build("xf_roformer", "Model"), None),
    ):
        for count in (limit - 2, limit - 1):
            given = model, [" ".join(["the"] * count)], [[(0, 3)]]
            if count + 2 > limit and said is not None:
                with pytest.raises(ValueError, match=said):
                    late_chunks(*given, tokenizer=words)
            else:
                assert late_chunks(*given, tokenizer=words)[0].isfinite().all()


def test_refusals():
    model, words = build("xf_longformer", "Model"), tokenizer()
    with pytest.raises(TypeError, match="fast tokenizer"):
        late_chunks(model, ["rain fell"], [[(0, 4)]])
    with pytest.raises(ValueError, match="2 texts have spans for 1"):
        late_chunks(model, ["rain", "fell"], [[(0, 4)]], tokenizer=words)
    with pytest.raises(ValueError, match=r"span \(4, 5\) of text 1 has no token"):
        late_chunks(model, ["rain fell"] * 2, [[(0, 4)], [(4, 5)]], tokenizer=words)
    states = torch.randn(1, 4, 2)
    with pytest.raises(ValueError, match=r"span \(2, 4\) of row 0 .* within 3 tokens"):
        pool_spans(states, torch.tensor([[0, 1, 1, 1]]), [[(2, 4)]])
    with pytest.raises(ValueError, match="1 rows have spans for 2"):
        pool_spans(states, None, [[], []])
    with pytest.raises(ValueError, match="4 states for 5 tokens"):
        pool_spans(states, torch.ones(1, 5), [[]])
