"""What is held out is said where it is not what was asked for."""

import pytest
from datasets import Dataset
from transformers.utils import logging

from hf_xformers.data.splitting import divide_rows, stable_fraction


@pytest.mark.parametrize(
    "texts, fraction, said",
    [
        ([str(n) for n in range(1000)], 0.1, None),
        (
            [str(n) for n in range(60)],
            0.1,
            " of 60 rows (60 different ones, equal ones stay together) are held out for",
        ),
        ([str(n % 2) for n in range(1000)], 0.1, "500 of 1000 rows (2 different ones, "),
        ([str(n % 2) for n in range(1000)], 0.99, None),
    ],
    ids=["usual", "few", "equal", "equal and all below"],
)
def test_a_tiny_or_odd_share_is_said(texts, fraction, said, caplog):
    keys = [stable_fraction(text) for text in texts]
    logging.enable_propagation()
    try:
        train, validation = divide_rows(Dataset.from_dict({"text": texts}), keys, fraction)
    finally:
        logging.disable_propagation()
    assert len(train) + len(validation) == len(texts) and not set(train["text"]) & set(validation["text"])
    assert caplog.text == "" if said is None else said in caplog.text
