"""A target small enough for any test: four random Llama layers behind a real tokenizer and chat template."""

from __future__ import annotations

from pathlib import Path
from typing import Any

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|mask|>"]  # ids 0 to 3
MASK_TOKEN_ID = 3
VOCAB_SIZE = 512
TEXT = [
    "def area(width, height):\n    return width * height\n",
    "for name in names:\n    print(name, len(name))\n",
    "if value is None:\n    raise ValueError('the value is missing')\n",
    "class Point:\n    def __init__(self, x, y):\n        self.x, self.y = x, y\n",
    "Write the function that returns the sum of all numbers in the list.\n",
    "A drafter proposes several tokens at once; the target accepts the longest run it would have written.\n",
    "Speculative decoding never changes what comes out, only how many steps it takes to get there.\n",
    "def merge(left: dict, right: dict) -> dict:\n    result = left.copy()\n    result.update(right)\n",
    "while queue:\n    node = queue.pop(0)\n    for child in node.children:\n        queue.append(child)\n",
    "try:\n    number = int(string)\nexcept (TypeError, KeyError):\n    pass\nelse:\n    total += number\n",
    "import os\nwith open(os.path.join(path, 'file.txt')) as file:\n    lines = file.readlines()\n",
]


def make_tiny_target(directory: str | Path, *, seed: int = 0, **config: Any) -> Path:
    """Write a random Llama with a byte-level tokenizer and return its directory.

    It has 4 layers of width 64 and a vocabulary of 512. The mask token is id 3, the only end token id 2. The
    same seed gives the same files. `config` changes LlamaConfig.
    """
    import torch
    from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

    settings: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 2048,
        "rope_theta": 10_000.0,
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 2,
        # Wide enough that the two best tokens are seldom a near tie.
        "initializer_range": 0.15,
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(LlamaConfig(**(settings | config)))
    model.generation_config = GenerationConfig(bos_token_id=1, eos_token_id=2, pad_token_id=2)
    model.save_pretrained(directory)
    make_tiny_tokenizer().save_pretrained(directory)
    return Path(directory)


def make_tiny_tokenizer() -> Any:
    """Return a byte-level BPE of 512 entries, trained on `TEXT`: every string has ids; 0 to 3 are special."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        TEXT,
        trainers.BpeTrainer(
            vocab_size=VOCAB_SIZE,
            special_tokens=SPECIAL,
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
            min_frequency=1,
            show_progress=False,
        ),
    )
    assert tokenizer.get_vocab_size() == VOCAB_SIZE
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token=SPECIAL[0],
        bos_token=SPECIAL[1],
        eos_token=SPECIAL[2],
        pad_token=SPECIAL[2],
        chat_template=CHATML,
    )
