from transformers.utils import logging

from tests.training.conftest import own_cache  # noqa: F401

logging.get_logger("transformers")  # now, so that its handler does not keep the captured stream of the first test
