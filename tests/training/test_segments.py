"""Training on contiguous segments: the order of rows, the memory from batch to batch, resets, resumption."""

import pytest
import torch
from transformers import TrainerCallback

from hf_xformers import XFormerForCausalLM
from hf_xformers.training.segments import SegmentCarrier, StreamSampler
from hf_xformers.training.trainer import XFormerTrainer
from hf_xformers.variants.transformer_xl import XFTransformerXLConfig, XFTransformerXLForCausalLM
from tests.helpers import NO_DROPOUT, close
from tests.training.runs import plain_sgd, same_parameters, stacked
from tests.training.test_trainer import VOCAB, config, logged

LENGTH = 6


def model(seed=0, dropout=0.0):
    torch.manual_seed(seed)
    return XFTransformerXLForCausalLM(
        XFTransformerXLConfig(
            vocab_size=VOCAB,
            hidden_size=16,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=16,
            max_position_embeddings=8,
            **{**NO_DROPOUT, "hidden_dropout_prob": dropout},
        )
    )


def rows(count):
    ids = torch.randint(1, VOCAB, (count, LENGTH), generator=torch.Generator().manual_seed(0))
    return [{"input_ids": row, "labels": row} for row in ids]


class Record(TrainerCallback):
    """Batches as the model saw them."""

    def __init__(self, trained):
        self.batches = []
        trained.register_forward_pre_hook(self.hook, with_kwargs=True)

    def hook(self, module, args, kwargs):
        self.batches.append((kwargs["input_ids"], kwargs.get("segment_memory"), module.training))


def train(trained, folder, data, evaluation=None, resume=None, **settings):
    defaults = {
        "max_steps": 4,
        "per_device_train_batch_size": 2,
        "per_device_eval_batch_size": 2,
        "max_grad_norm": 1.0,
    }
    trainer = XFormerTrainer(
        model=trained,
        args=plain_sgd(folder, **{**defaults, **settings}),
        train_dataset=data,
        eval_dataset=evaluation,
        data_collator=stacked,
        segment_streams=True,
    )
    trainer.train(resume_from_checkpoint=resume)
    return trainer


@pytest.mark.parametrize("count,streams,keep_all", [(12, 3, False), (13, 3, False), (14, 3, True), (2, 3, True)])
def test_streams_are_contiguous(count, streams, keep_all):
    sampler = StreamSampler(count, streams, keep_all)
    order = list(sampler)
    assert len(order) == len(sampler) == len(set(order))
    assert set(order) == set(range(count)) if keep_all else len(order) == count // streams * streams
    for before, after in zip(order, order[streams:], strict=False):
        assert after == before + 1
    with pytest.raises(ValueError, match="2 rows cannot"):
        StreamSampler(2, 3)


def test_memory_is_carried(tmp_path):
    """The losses are those of a loop over the streams by hand; an epoch begins anew."""
    data, trained = rows(8), model()
    record = Record(trained)
    trainer = train(trained, tmp_path, data, max_steps=6)
    by_hand, optimized = model(), []
    optimizer = torch.optim.SGD(by_hand.parameters(), lr=0.05)
    memory = None
    for step in range(6):
        time = step % 4
        memory = None if time == 0 else memory
        ids = torch.stack([data[time]["input_ids"], data[4 + time]["input_ids"]])
        assert torch.equal(record.batches[step][0], ids)
        assert (record.batches[step][1] is None) == (time == 0)
        output = by_hand(ids, labels=ids, segment_memory=memory, use_cache=False)
        memory = output.segment_memory
        optimized.append(output.loss.item())
        optimizer.zero_grad()
        output.loss.backward()
        torch.nn.utils.clip_grad_norm_(by_hand.parameters(), 1.0)
        optimizer.step()
    close(torch.tensor(logged(trainer, "loss")), torch.tensor(optimized), 1e-4)
    same_parameters(trained, by_hand, 1e-5, 1e-5)


def test_micro_batches_follow_each_other(tmp_path):
    trained = model()
    record = Record(trained)
    train(trained, tmp_path, rows(8), max_steps=2, gradient_accumulation_steps=2)
    assert [batch[1] is None for batch in record.batches] == [True, False, False, False]
    assert torch.equal(record.batches[3][0][0], rows(8)[3]["input_ids"])


def test_evaluation_has_a_memory_of_its_own(tmp_path):
    """Evaluation reads its text in streams, all of it, and leaves the training memory alone."""
    text = rows(5)
    ids = torch.stack([row["input_ids"] for row in text])
    trained = model()
    trainer = train(trained, tmp_path, rows(8), evaluation=text, max_steps=2, eval_strategy="steps", eval_steps=1)
    kept = trainer.segments.training
    found = trainer.evaluate()
    assert trainer.segments.training is kept
    trained.eval()
    total, count = 0.0, 0
    with torch.no_grad():
        for stream in (ids[:3], ids[3:]):
            memory = None
            for row in stream:
                output = trained(row[None], labels=row[None], segment_memory=memory, use_cache=False)
                memory = output.segment_memory
                total, count = total + output.loss.item() * (LENGTH - 1), count + LENGTH - 1
    assert found["eval_loss"] == pytest.approx(total / count, rel=1e-5)


def test_rows_that_begin_a_text_forget(tmp_path):
    data = rows(6)
    for index, row in enumerate(data):
        row["segment_start"] = index in (0, 3, 4)
    trained = model()
    record = Record(trained)
    train(trained, tmp_path, data, max_steps=3)
    assert record.batches[1][1].mask.tolist() == [[True] * 6, [False] * 6]
    assert record.batches[2][1].mask.tolist() == [[True] * 8, [False] * 2 + [True] * 6]
    with pytest.raises(ValueError, match="segment_recurrent"):  # a model without memory
        train(XFormerForCausalLM(config()), tmp_path, rows(4))


@pytest.mark.parametrize("stop", [3, 4])
def test_resumption_restores_the_memory(tmp_path, stop):
    """In the middle of an epoch (four batches) and at its end."""
    settings = {"save_strategy": "steps", "save_steps": stop, "max_steps": 7}
    whole = train(model(dropout=0.1), tmp_path / "whole", rows(8), **settings)
    checkpoint = tmp_path / "whole" / f"checkpoint-{stop}"
    assert SegmentCarrier.file(checkpoint, 0).is_file()
    again = model(seed=5, dropout=0.1)
    record = Record(again)
    resumed = train(again, tmp_path / "again", rows(8), resume=str(checkpoint), **settings)
    assert (record.batches[0][1] is None) == (stop == 4)
    assert logged(resumed, "loss")[-3:] == logged(whole, "loss")[-3:]
    same_parameters(again, whole.model, 0, 0)
