"""InfoWord: a golden row, draws, batches, the head by loops, what is refused."""

import math
from collections import Counter

import pytest
import torch

import hf_xformers.cli
from hf_xformers import XFBertConfig, XFBertForPhraseContrast
from hf_xformers.objectives import InfoWordObjective, build_objective
from hf_xformers.objectives.info_word import PhraseNoise, apply_noise, sample_noise
from hf_xformers.objectives.masked_lm import KEEP, MASK, RANDOM, MaskNoise
from hf_xformers.training.building import check_objective
from hf_xformers.variants import config_class
from tests.helpers import close, make_strong, pad, tokens
from tests.training.runs import write_text

SIZES = dict(
    vocab_size=99, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32,
    max_position_embeddings=32, type_vocab_size=0,
)  # fmt: skip


def model(**fields):
    torch.manual_seed(0)
    return make_strong(XFBertForPhraseContrast(XFBertConfig(**{**SIZES, **fields})).double().eval())


def test_golden_row():
    """[CLS] a b c d e f [SEP]: the phrase b c is masked, e replaced by 17 and f kept."""
    ids = torch.tensor([2, 10, 11, 12, 13, 14, 15, 3])
    selected = torch.tensor([0, 0, 1, 1, 0, 1, 1, 0]).bool()
    action = torch.tensor([KEEP, KEEP, MASK, MASK, KEEP, RANDOM, KEEP, KEEP], dtype=torch.int8)
    noise = PhraseNoise(2, 4, MaskNoise(selected, action, torch.full((8,), 17)))
    inputs, labels, phrase = apply_noise(ids, 1, 7, noise, 4)
    assert inputs.tolist() == [2, 10, 4, 4, 13, 17, 15, 3]
    assert labels.tolist() == [-100, -100, 11, 12, -100, 14, 15, -100]
    assert phrase.tolist() == [2, 11, 12, 3]


def test_draws():
    """Lengths by the normal law, places evenly, as many targets as the share says, the phrase wholly masked."""
    spec, vocabulary = InfoWordObjective(mask_prob=0.5), torch.arange(5, 99)
    special = torch.zeros(32, dtype=torch.bool)
    special[[0, 31]] = True
    draw, sizes, starts, replaced, rows = torch.Generator().manual_seed(0), Counter(), Counter(), Counter(), 3000
    for _ in range(rows):
        noise = sample_noise(special, spec, vocabulary, draw)
        inside = torch.zeros(32, dtype=torch.bool)
        inside[noise.start : noise.stop] = True
        chosen = noise.masks.selected
        assert int(chosen.sum()) == 15 and not (chosen & special).any()
        assert (noise.masks.action[inside] == MASK).all() and chosen[inside].all()
        sizes[noise.stop - noise.start] += 1
        if noise.stop - noise.start == 5:
            starts[noise.start] += 1
        replaced.update(noise.masks.action[chosen & ~inside].tolist())

    def near(found, total, share):
        return abs(found - total * share) <= 4 * math.sqrt(total * share * (1 - share))

    def below(x):
        return (1 + math.erf(x / math.sqrt(2))) / 2

    for size in range(3, 8):
        assert near(sizes[size], rows, below(size - 4.5) - below(size - 5.5)), size
    assert set(starts) == set(range(1, 27)) and all(near(count, sizes[5], 1 / 26) for count in starts.values())
    for kind, share in ((MASK, 0.8), (RANDOM, 0.1), (KEEP, 0.1)):
        assert near(replaced[kind], sum(replaced.values()), share)


def test_short_rows_and_separators():
    """A phrase has no more tokens than are to be predicted, and does not reach over a special token."""
    draw, vocabulary = torch.Generator().manual_seed(0), torch.arange(5, 99)
    special = torch.tensor([1, 0, 0, 1, 0, 0, 0, 1]).bool()
    for share, size in ((0.9, 3), (0.2, 1)):
        for _ in range(20):
            noise = sample_noise(special, InfoWordObjective(mask_prob=share, span_std=0), vocabulary, draw)
            assert noise.stop - noise.start == size and not special[noise.start : noise.stop].any()
    none = sample_noise(torch.ones(2, dtype=torch.bool), InfoWordObjective(), vocabulary, draw)
    assert (none.start, none.stop) == (0, 0) and not none.masks.selected.any()


@pytest.mark.parametrize("side", ["right", "left"])
def test_batches(bert_tokenizer, side):
    bert_tokenizer.padding_side = side
    rows = [{"input_ids": [2, *range(5, 35), 3]}, {"input_ids": [2, 40, 41, 3]}, {"input_ids": [2, 3]}]
    collate = build_objective("info_word").collator(bert_tokenizer)
    batch = collate(rows)
    phrases = []
    for index, row in enumerate(rows):
        real = batch["attention_mask"][index].bool()
        inputs, labels = batch["input_ids"][index][real].tolist(), batch["labels"][index][real].tolist()
        assert [a if b == -100 else b for a, b in zip(inputs, labels)] == row["input_ids"]
        assert (batch["labels"][index][~real] == -100).all()
        phrase = batch["phrase_input_ids"][index][batch["phrase_attention_mask"][index].bool()].tolist()
        phrases.append(phrase)
        if index < 2:
            assert phrase[0] == 2 and phrase[-1] == 3
            start = row["input_ids"].index(phrase[1])
            assert row["input_ids"][start : start + len(phrase) - 2] == phrase[1:-1]
            mask = bert_tokenizer.mask_token_id
            assert inputs[start : start + len(phrase) - 2] == [mask] * (len(phrase) - 2)
    assert phrases[2] == [] and batch["phrase_keys"].unique().numel() == 3
    alone = collate(rows[:1])
    assert alone["phrase_input_ids"][0].tolist() == phrases[0] and alone["phrase_keys"][0] == batch["phrase_keys"][0]
    collate.set_epoch(1)
    assert not torch.equal(collate(rows)["input_ids"], batch["input_ids"])
    bert_tokenizer.padding_side = "right"


@torch.no_grad()
def test_head_by_loops():
    """Four texts, of which the last one's phrase is the first one's and the third has none."""
    weights = {"temperature": 2.0, "contrast_weight": 0.5, "masked_lm_weight": 0.25}
    net = model(pretraining={"phrase_contrast": weights})
    ids, phrases = tokens(4, 7), tokens(4, 4, seed=1)
    phrases[3] = phrases[0]
    mask, keys = torch.ones_like(phrases), torch.tensor([7, 8, 9, 7])
    mask[2] = 0
    labels = torch.full_like(ids, -100)
    labels[0, 1], labels[3, 2] = 5, 6
    output = net(ids, labels=labels, phrase_input_ids=phrases, phrase_attention_mask=mask, phrase_keys=keys)
    a, b = net.model(ids).last_hidden_state[:, 0].tolist(), net.model(phrases).last_hidden_state[:, 0].tolist()
    total = 0.0
    for i, others in ((0, [0, 1]), (1, [0, 1, 3]), (3, [3, 1])):
        s = {j: sum(x * y for x, y in zip(a[i], b[j])) / 2 for j in others}
        total += -s[i] + math.log(sum(math.exp(value) for value in s.values()))
    close(output.aux_losses["phrase_contrast"], torch.tensor(total / 6, dtype=torch.float64))
    assert output.phrase_targets.tolist() == [0, 1, -100, 3]
    told = -output.logits.log_softmax(-1)[[0, 3], [1, 2], [5, 6]]
    close(output.loss, 0.25 * told.mean() + total / 6)
    given = {"phrase_input_ids": phrases, "phrase_attention_mask": mask, "phrase_keys": keys, "labels": labels}
    close(net(ids, **given, num_items_in_batch=8).loss, (0.25 * told.mean() + total / 6) * 2 / 8)
    for side in ("right", "left"):
        padded, seen = pad(list(ids), 9, side)
        others, there = pad(list(phrases), 6, side)
        there[2] = 0
        found = net(padded, seen, phrase_input_ids=others, phrase_attention_mask=there, phrase_keys=keys)
        close(found.phrase_logits[:, [0, 1, 3]], output.phrase_logits[:, [0, 1, 3]])


def test_vectors():
    """Equal vectors: ln of the number of phrases. The loss falls where a phrase's vector comes near its text's."""
    net, there = model(), torch.ones(8, 1)
    *_, loss = net.contrast(torch.zeros(8, 4), torch.randn(8, 4), there, None)
    assert loss.item() == pytest.approx(2.079441, abs=1e-6)
    texts = torch.randn(8, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    losses = [net.contrast(texts, share * texts, there, None)[2].item() for share in (0.0, 0.5, 1.0)]
    assert losses == sorted(losses, reverse=True)
    *_, alone = net.contrast(texts[:1], texts[:1], there[:1], None)
    assert alone.item() == 0


def test_refusals(bert_tokenizer, tmp_path, capsys):
    text = write_text(tmp_path / "text.txt", lines=20)
    options = ["pretrain", "--variant", "bert", "--objective", "info_word", "--data", str(text), "--max_steps", "1"]
    options += ["--output_dir", str(tmp_path / "out"), "--per_device_train_batch_size", "1"]
    assert hf_xformers.cli.main(options) != 0
    assert "per_device_train_batch_size of at least 2" in capsys.readouterr().err
    with pytest.raises(ValueError, match="span_min <= span_max"):
        build_objective({"type": "info_word", "span_min": 11})
    with pytest.raises(ValueError, match="needs a ForPhraseContrast class"):
        check_objective(config_class("xf_roberta"), "info_word")
