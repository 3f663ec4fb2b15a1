"""Sentence masking: rates, what the encoder reads and the decoder writes, rows of documents."""

import pytest
import torch
from datasets import Dataset

from hf_xformers.data.sentences import document_rows, split_sentences
from hf_xformers.objectives import SentenceMaskingObjective
from hf_xformers.objectives.sentence_masking import KEEP, MASK, REPLACE, sample_noise

SEP, MASK_ID = 3, 4


def row(*lengths, start=5):
    ids, numbers = [], []
    for number, length in enumerate(lengths):
        ids += [*range(start, start + length - 1), SEP]
        numbers += [number] * length
        start += length
    return {"input_ids": ids, "sentence_ids": numbers}


def test_rates():
    generator, chosen, kinds = torch.Generator().manual_seed(0), 0, []
    for _ in range(300):
        places, kind, other = sample_noise(40, 0.15, 0.8, 0.1, generator)
        assert len(places.unique()) == len(places) and not (places == other).any()
        chosen += len(places)
        kinds += kind.tolist()
    assert chosen == 300 * 6  # 15 % of 40
    for kind, share in ((MASK, 0.8), (KEEP, 0.1), (REPLACE, 0.1)):
        assert abs(kinds.count(kind) / len(kinds) - share) < 0.03
    assert sample_noise(1, 0.15, 0.0, 1.0, generator)[1].tolist() == [MASK]


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize(("probabilities", "kind"), [((1, 0), MASK), ((0, 1), REPLACE), ((0, 0), KEEP)])
def test_what_the_encoder_reads_and_the_decoder_writes(bert_tokenizer, side, probabilities, kind):
    bert_tokenizer.padding_side = side
    objective = SentenceMaskingObjective(mask_rate=0.5, mask_prob=probabilities[0], random_prob=probabilities[1])
    rows = [row(4, 2, 5, 3), row(3, 6)]
    batch = objective.collator(bert_tokenizer, seed=1)(rows)
    bert_tokenizer.padding_side = "right"
    assert (batch["target_positions"] >= 0).sum(1).tolist() == [2, 1]
    for index, original in enumerate(rows):
        real = batch["attention_mask"][index].bool()
        ids, numbers = batch["input_ids"][index], batch["sentence_ids"][index]
        assert numbers[real].tolist() == sorted(numbers[real].tolist())
        sentences = torch.tensor(original["input_ids"]).split(
            torch.tensor(original["sentence_ids"]).unique_consecutive(return_counts=True)[1].tolist()
        )
        places = [place for place in batch["target_positions"][index].tolist() if place >= 0]
        for place, label in zip(places, batch["labels"][index]):
            number = int(numbers[place])
            assert place == int((real & (numbers == number)).nonzero().max()) and ids[place] == SEP
            assert label[label != -100].tolist() == sentences[number].tolist()
            read = ids[real & (numbers == number)]
            if kind == MASK:
                assert (read[:-1] == MASK_ID).all() and len(read) == len(sentences[number])
            elif kind == KEEP:
                assert torch.equal(read, sentences[number])
            else:
                assert any(torch.equal(read, other) for other in sentences) and not torch.equal(
                    read, sentences[number]
                )
    assert objective.collator(bert_tokenizer, seed=1)(rows[:1])["labels"][0, 0, 0] == batch["labels"][0, 0, 0]


def test_documents_become_rows_of_whole_sentences(bert_tokenizer):
    assert split_sentences('He said "no." Then 3 came\nin. e.g. this\n\nNew one') == [
        'He said "no."', "Then 3 came in. e.g. this", "New one"
    ]  # fmt: skip
    texts = Dataset.from_dict({"text": ["w1 w2. W3 w4 w5 w6 w7. W8.", "", "w9"]})
    rows = document_rows(texts, bert_tokenizer, 8, 4)
    assert [len(entry["input_ids"]) for entry in rows] == [8, 3, 2]
    assert rows[0]["sentence_ids"] == [0, 0, 0, 0, 1, 1, 1, 1] and rows[0]["input_ids"][3::4] == [SEP, SEP]
    with pytest.raises(ValueError, match="no document has a sentence"):
        document_rows(Dataset.from_dict({"text": [" "]}), bert_tokenizer, 8, 4)
    with pytest.raises(ValueError, match="sentences of up to 9 tokens do not fit into rows of 8"):
        document_rows(texts, bert_tokenizer, 8, 9)


def test_refusals(bert_tokenizer, gpt_tokenizer):
    with pytest.raises(ValueError, match="must not add up to more than 1"):
        SentenceMaskingObjective(mask_prob=0.8, random_prob=0.3)
    with pytest.raises(ValueError, match="no mask token"):
        SentenceMaskingObjective().collator(gpt_tokenizer)
    with pytest.raises(ValueError, match="no 'sentence_ids'"):
        SentenceMaskingObjective().collator(bert_tokenizer)([{"input_ids": [5, 6]}])
    with pytest.raises(ValueError, match="has no sentence"):
        SentenceMaskingObjective().collator(bert_tokenizer)([{"input_ids": [], "sentence_ids": []}])
