"""`transformers serve` with self-contained checkpoints, asked by OpenAI's client over loopback."""

import logging
import socket
import time
from pathlib import Path
from urllib.request import urlopen

import pytest
import torch

from hf_xformers.hub import bundle
from tests.clients.checkpoints import build, save, tokenizer
from tests.hub.isolated import run_without_package

PROMPT = "the small cat sat on"
CHAT = [{"role": "user", "content": "a dog"}, {"role": "user", "content": "ran over"}]
TEMPLATE = "{% for message in messages %}{{ message['content'] + ' ' }}{% endfor %}"
NEW = 5


@pytest.fixture(scope="module")
def openai():
    for name in ("fastapi", "uvicorn", "openai"):
        pytest.importorskip(name, reason=f"`transformers serve` needs {name}: pip install transformers[serving]")
    import openai

    return openai


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """name -> (model, folder with weights, code and tokenizer)."""

    def made(name):
        folder = tmp_path_factory.mktemp("served") / name
        model = build(name, "ForCausalLM", eos_token_id=None)
        words = tokenizer("bos")
        words.chat_template = TEMPLATE
        try:
            save(model, "ForCausalLM", folder)
        finally:
            words.chat_template = None
        bundle(folder, folder)
        return model, folder

    return made


class Server:
    """`transformers serve FOLDER --trust-remote-code` in a thread of this process, and a client of it."""

    def __init__(self, openai, folder, **options):
        from transformers.cli.serve import Serve

        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        logging.getLogger("uvicorn.access").disabled = True
        settings = {"host": "127.0.0.1", "port": self.port, "device": "cpu", "non_blocking": True, **options}
        self.serve = Serve(force_model=str(folder), trust_remote_code=True, log_level="error", **settings)
        self.model, self.client = (
            str(folder),
            openai.OpenAI(base_url=f"http://127.0.0.1:{self.port}/v1", api_key="none", max_retries=0, timeout=30),
        )
        for _ in range(200):
            if self.serve.server.started:
                break
            time.sleep(0.02)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.client.close()
        self.serve.kill_server()

    def complete(self, prompt, **options):
        return self.client.completions.create(
            model=self.model, prompt=prompt, max_tokens=NEW, temperature=0, **options
        )


def written(model, text, **options):
    words = tokenizer("bos")
    ids = words(text, return_tensors="pt", **options)["input_ids"]
    with torch.no_grad():
        ids = model.generate(ids, max_new_tokens=NEW, do_sample=False)[0, ids.shape[1] :]
    return words.decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize("name", ["xf_gpt2", "xf_performer"])
def test_completions_and_chat(name, checkpoint, openai):
    """What the server writes is what the model writes, whole and as a stream."""
    model, folder = checkpoint(name)
    with Server(openai, folder) as server:
        answer = server.complete(PROMPT)
        assert answer.choices[0].text == written(model, PROMPT) and answer.usage.completion_tokens == NEW
        stream = server.complete("who saw", stream=True)
        assert "".join(part.choices[0].text for part in stream) == written(model, "who saw")
        answer = server.client.chat.completions.create(
            model=server.model, messages=CHAT, max_tokens=NEW, temperature=0
        )
        assert answer.choices[0].message.content == written(model, "a dog ran over ", add_special_tokens=False)


def test_continuous_batching(checkpoint, openai):
    """The same with keys and values in pages, several requests at once."""
    from concurrent.futures import ThreadPoolExecutor

    model, folder = checkpoint("xf_gpt2")
    options = {"continuous_batching": True, "cb_num_blocks": 8, "cb_max_batch_tokens": 64}
    prompts = [PROMPT, "who saw the bird", "rain", "a dog ran over the wide green field"]
    with Server(openai, folder, **options) as server, ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(server.complete, prompts))
    assert [answer.choices[0].text for answer in answers] == [written(model, prompt) for prompt in prompts]


def test_without_pages(checkpoint, openai):
    """A state of constant size has no place there: the client is told so, and the server goes on."""
    _, folder = checkpoint("xf_performer")
    with Server(openai, folder, continuous_batching=True) as server:
        with pytest.raises(openai.APIStatusError):
            server.complete(PROMPT)
        with urlopen(f"http://127.0.0.1:{server.port}/health") as answer:
            assert answer.status == 200


def test_generate_takes_a_tokenizer():
    """transformers hands it on to the model, which has no use for it."""
    model, ids = build("xf_gpt2", "ForCausalLM", eos_token_id=None), torch.tensor([[5, 6, 7]])
    settings = {"max_new_tokens": 4, "do_sample": False}
    assert torch.equal(model.generate(ids, tokenizer=tokenizer("bos"), **settings), model.generate(ids, **settings))


ALONE = """
import socket, sys, time
sys.path += sys.argv[3:]  # where the client is
from openai import OpenAI
from transformers.cli.serve import Serve

with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    port = free.getsockname()[1]
serve = Serve(sys.argv[1], trust_remote_code=True, device="cpu", host="127.0.0.1", port=port, non_blocking=True)
while not serve.server.started:
    time.sleep(0.02)
client = OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", timeout=30)
answer = client.completions.create(model=sys.argv[1], prompt=sys.argv[2], max_tokens=5, temperature=0)
print("written:", answer.choices[0].text)
serve.kill_server()
"""


@pytest.mark.slow
def test_where_the_package_is_not_installed(checkpoint, openai, tmp_path):
    model, folder = checkpoint("xf_gpt2")
    place = str(Path(openai.__file__).parents[1])
    printed = run_without_package(ALONE, str(folder), PROMPT, place, home=tmp_path)
    assert f"written: {written(model, PROMPT)}\n" in printed
