"""Our conversion of the bundled GGUF file against transformers' own, which takes far longer."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from cluster import model_store
from cluster.config import BUNDLED_MODEL

pytestmark = [pytest.mark.contract, pytest.mark.slow]

TEXTS = (
    "Hello world, it's 45.6% of 7,890!\n\n  def f(x):\treturn x*10",
    "Zürich 日本語 🙂",
    "<|im_start|>user\nhi<|im_end|>\n",
    " 2024-01-02 a1b22c333 ",
)


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Path:
    cache = tmp_path_factory.mktemp("cache")
    return model_store.prepare_model(BUNDLED_MODEL, None, cache, lambda _: None).path


@pytest.mark.full
def test_config_and_weights_are_those_that_transformers_makes(ours: Path) -> None:
    source = model_store.find_bundled()
    config = AutoConfig.from_pretrained(source.parent, gguf_file=source.name)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    loaded = load_gguf_checkpoint(str(source), return_tensors=True, model_to_load=model)
    expected = {name: tensor.to(torch.bfloat16) for name, tensor in loaded["tensors"].items()}
    with safe_open(ours / "model.safetensors", "pt") as stored:
        assert set(stored.keys()) == set(expected)
        for name, tensor in expected.items():
            assert torch.equal(stored.get_tensor(name), tensor), name
    wanted = {
        **config.to_dict(),
        "architectures": ["LlamaForCausalLM"],  # filled in when a model is saved
        "dtype": "bfloat16",
    }
    for key, value in json.loads((ours / "config.json").read_text()).items():
        assert wanted[key] == value, key


def test_texts_tokenize_as_with_transformers_but_for_spaces_before_digits(ours: Path) -> None:
    source = model_store.find_bundled()
    theirs = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    tokenizer = AutoTokenizer.from_pretrained(ours)
    for text in TEXTS:
        numbers = tokenizer(text)["input_ids"]
        assert numbers == theirs(text)["input_ids"], text
        assert tokenizer.decode(numbers) == text
    # The model was trained with digits split off first, which transformers' conversion leaves out.
    assert tokenizer.tokenize("  99") == ["ĠĠ", "9", "9"]
    messages = [{"role": "user", "content": "What is 12+30?"}]
    assert tokenizer.apply_chat_template(messages, tokenize=False) == theirs.apply_chat_template(
        messages, tokenize=False
    )
    assert (tokenizer.eos_token, tokenizer.pad_token) == (theirs.eos_token, theirs.pad_token)
