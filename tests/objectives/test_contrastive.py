"""Contrast of two views of a text: crops, batches, the loss by hand, what is refused, a run that goes on exactly."""

import math

import pytest
import torch

import hf_xformers.cli
from hf_xformers import XFBertConfig, XFBertForTextContrast
from hf_xformers.objectives import build_objective
from hf_xformers.objectives.contrastive import apply_noise, sample_noise
from tests.helpers import close, make_strong, pad, tokens
from tests.training.runs import write_text

SIZES = dict(
    vocab_size=99, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32,
    max_position_embeddings=32, type_vocab_size=0,
)  # fmt: skip


def model(**fields):
    torch.manual_seed(0)
    return make_strong(XFBertForTextContrast(XFBertConfig(**{**SIZES, **fields})).double().eval())


def test_crops():
    ids = torch.tensor([2, 5, 6, 7, 8, 9, 10, 3])
    one, two = apply_noise(ids, 1, 7, torch.tensor([0, 3, 3]))
    assert one.tolist() == [2, 5, 6, 7, 3] and two.tolist() == [2, 8, 9, 10, 3]
    generator, counts = torch.Generator().manual_seed(0), torch.zeros(2, 4)
    for _ in range(2000):
        first, second, size = sample_noise(6, 0.5, generator).tolist()
        assert size == 3
        counts[0, first] += 1
        counts[1, second] += 1
    assert ((counts / 2000 - 0.25).abs() < 4 * math.sqrt(0.25 * 0.75 / 2000)).all()
    assert sample_noise(1, 0.1, generator).tolist() == [0, 0, 1]


@pytest.mark.parametrize("side", ["right", "left"])
def test_batches(bert_tokenizer, side):
    bert_tokenizer.padding_side = side
    rows = [{"input_ids": [2, *range(5, 17), 3]}, {"input_ids": [2, 30, 31, 3]}, {"input_ids": [2, 3]}]
    collate = build_objective({"type": "contrastive", "num_negatives": 5}).collator(bert_tokenizer)
    batch = collate(rows)
    for name in ("", "second_"):
        for row, ids, mask in zip(rows, batch[f"{name}input_ids"], batch[f"{name}attention_mask"], strict=True):
            found, text = ids[mask.bool()].tolist(), row["input_ids"]
            size = len(text) - 2
            assert found[0] == 2 and found[-1] == 3 and len(found) - 2 == (size + 1) // 2
            start = text.index(found[1])
            assert found[1:-1] == text[start : start + len(found) - 2]
    assert batch["text_keys"].unique().numel() == 3 and batch["negative_draws"].shape == (3, 5)
    alone = collate(rows[1:2])
    assert torch.equal(alone["negative_draws"][0], batch["negative_draws"][1])
    assert torch.equal(
        alone["second_input_ids"][0], batch["second_input_ids"][1][batch["second_attention_mask"][1] > 0]
    )
    bert_tokenizer.padding_side = "right"
    dropout = build_objective({"type": "contrastive", "views": "dropout"}).collator(bert_tokenizer)(rows)
    assert set(dropout) == {"input_ids", "attention_mask", "labels", "text_keys"}


@pytest.mark.parametrize("loss", ["info_nce", "ctl", "ranking", "nce", "negative_sampling"])
def test_loss_equals_its_equation(loss):
    """Four texts, the last one equal to the first and the third no anchor; by loops over all pairs."""
    net = model(pretraining={"text_contrast": {"loss": loss, "temperature": 0.5, "noise_power": 0.5}})
    first, second = tokens(4, 7), tokens(4, 5, seed=1)
    keys, labels = torch.tensor([11, 12, 13, 11]), torch.tensor([0, 0, -100, 0])
    draws = torch.tensor([[0.1, 0.7], [0.2, 0.9], [0.5, 0.5], [0.99, 0.3]])
    drawn = loss not in ("info_nce",)
    draws = draws[:, :1] if loss == "ctl" else draws
    with torch.no_grad():
        output = net(
            first, labels=labels, second_input_ids=second, text_keys=keys, negative_draws=draws if drawn else None
        )
        a, b = net(first).vectors.tolist(), net(second).vectors.tolist()
    close(torch.tensor(a, dtype=torch.float64).square().sum(-1), torch.ones(4, dtype=torch.float64))
    q = [math.sqrt(2) / 2, 1, 1, math.sqrt(2) / 2]
    q = [each / sum(q) for each in q]
    total = 0.0
    for i in (0, 1, 3):
        s = [2 * sum(x * y for x, y in zip(a[i], b[j], strict=True)) for j in range(4)]
        wrong = [j for j in range(4) if keys[j] != keys[i]]
        if drawn:
            share, chosen = sum(q[j] for j in wrong), []
            for number in draws[i].tolist():
                upto = 0.0
                for j in wrong:
                    upto += q[j] / share
                    if number < upto:
                        chosen.append(j)
                        break
            wrong = chosen
        k = len(wrong)
        if loss == "ranking":
            total += sum(max(0.0, 1 - s[i] + s[j]) for j in wrong)
        elif loss in ("info_nce", "ctl"):
            total += -s[i] + math.log(sum(math.exp(s[j]) for j in [i, *wrong]))
        else:
            shift = [math.log(k * q[j]) if loss == "nce" else 0.0 for j in range(4)]
            total += math.log1p(math.exp(shift[i] - s[i]))
            total += sum(math.log1p(math.exp(s[j] - shift[j])) for j in wrong)
    assert output.loss.item() == pytest.approx(total / 3, abs=1e-9)
    assert output.targets.tolist() == [0, 1, -100, 3]
    with torch.no_grad():
        counted = net(
            first, labels=labels, second_input_ids=second, text_keys=keys, negative_draws=draws if drawn else None,
            num_items_in_batch=7,
        ).loss  # fmt: skip
    assert counted.item() == pytest.approx(total / 7, abs=1e-9)


def test_padding_and_lone_texts():
    net = model()
    first, second = tokens(3, 7), tokens(3, 5, seed=1)
    given = {"labels": torch.zeros(3, dtype=torch.long)}
    with torch.no_grad():
        expected = net(first, second_input_ids=second, **given)
        for side in ("right", "left"):
            ids, mask = pad(list(first), 9, side)
            others, other_mask = pad(list(second), 8, side)
            found = net(ids, mask, second_input_ids=others, second_attention_mask=other_mask, **given)
            close(found.loss, expected.loss)
            # A row of padding alone is neither told apart nor a wrong answer.
            other_mask[2] = 0
            less = net(ids, mask, second_input_ids=others, second_attention_mask=other_mask, **given)
            pair = net(first[:2], second_input_ids=second[:2], labels=given["labels"][:2])
            close(less.loss, pair.loss)
            assert less.targets.tolist() == [0, 1, -100]
    funnel = {"type": "funnel", "upsample": False}
    fewer = model(stack=funnel, attention="transformer_xl", position="none")  # states than tokens
    with torch.no_grad():
        ids, mask = pad(list(first), 9, "right")
        close(fewer(ids, mask).vectors, fewer(first).vectors)
    alone = net.train()(first[:1], second_input_ids=second[:1], labels=given["labels"][:1])
    alone.loss.backward()
    assert alone.loss.item() == 0 and alone.targets.tolist() == [-100]
    # With dropout alone the views differ in training.
    twice = net.train()(first, **given)
    assert twice.logits.diagonal().detach().mul(0.05).lt(1 - 1e-6).all()


def test_refusals(tmp_path, capsys):
    text = write_text(tmp_path / "text.txt", lines=20)
    options = ["pretrain", "--variant", "bert", "--objective", "contrastive", "--data", str(text)]
    options += ["--output_dir", str(tmp_path / "out"), "--max_steps", "1"]
    assert hf_xformers.cli.main([*options, "--per_device_train_batch_size", "1"]) != 0
    assert "per_device_train_batch_size of at least 2" in capsys.readouterr().err
    assert hf_xformers.cli.main([*options, "--objective.views", "dropout", "--hidden_dropout_prob", "0",
                                 "--attention_probs_dropout_prob", "0"]) != 0  # fmt: skip
    assert "views='crops'" in capsys.readouterr().err
    with pytest.raises(ValueError, match="one wrong answer"):
        build_objective({"type": "contrastive", "loss": "ctl", "num_negatives": 3})
