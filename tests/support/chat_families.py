"""Chat templates of five families, a small tokenizer for them, and a slow oracle for ids and masks.

The oracle implements each family in plain Python: it writes a conversation piece by piece and marks the
pieces that the assistant wrote. A token is supervised when all of its characters are. The oracle shares
nothing with the code under test.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

CONTROLS = [
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|mask|>", "<|begin|>", "<|header|>", "<|end_header|>",
    "<|eot|>", "<bos>", "<eos>", "<turn>", "<end_of_turn>",
]  # fmt: skip
MASK_TOKEN_ID = CONTROLS.index("<|mask|>")

CHATML = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful assistant<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA = (
    "{{ bos_token }}{% for message in messages %}{{ '<|header|>' + message['role'] + '<|end_header|>\n\n' + "
    "message['content'] | trim + '<|eot|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|header|>assistant<|end_header|>\n\n' }}{% endif %}"
)
GEMMA = (
    "{{ '<bos>' }}{% for message in messages %}"
    "{% set role = 'model' if message['role'] == 'assistant' else message['role'] %}"
    "{{ '<turn>' + role + '\n' + message['content'] | trim + '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<turn>model\n' }}{% endif %}"
)
THINKING = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['role'] == 'assistant' and loop.last %}"
    "{{ '<think>\n' + (message.reasoning_content or '') + '\n</think>\n\n' }}{% endif %}"
    "{{ message['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
    "{% if enable_thinking is defined and enable_thinking is false %}"
    "{{ '<think>\n\n</think>\n\n' }}{% endif %}"
    "{% endif %}"
)
GENERATION = (
    "{% for message in messages %}{% if message['role'] == 'assistant' %}{{ '<|im_start|>assistant\n' }}"
    "{% generation %}{{ message['content'] + '<|im_end|>\n' }}{% endgeneration %}"
    "{% else %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TEMPLATES = {"chatml": CHATML, "llama": LLAMA, "gemma": GEMMA, "thinking": THINKING, "generation": GENERATION}

# Text, and whether the assistant wrote it.
Piece = tuple[str, bool]
Messages = list[dict[str, Any]]


@functools.cache
def small_tokenizer(family: str = "chatml") -> PreTrainedTokenizerFast:
    """Return a byte-level BPE tokenizer of 400 tokens that merges newlines and common words."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=[AddedToken(text, special=True, normalized=False) for text in CONTROLS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    text = "user assistant system model the answer is yes\n\nno, hello world\n\n\nWhat is this?\n\n " * 20
    tokenizer.train_from_iterator([text, "hello\n\nhello\n\n"], trainer)
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<|begin|>", eos_token="<|im_end|>", pad_token="<|im_end|>"
    )
    wrapped.chat_template = TEMPLATES[family]
    return wrapped


def _chatml(messages: Messages) -> list[Piece]:
    pieces: list[Piece] = []
    if messages[0]["role"] != "system":
        pieces.append(("<|im_start|>system\nYou are a helpful assistant<|im_end|>\n", False))
    return pieces + _generation(messages)


def _generation(messages: Messages) -> list[Piece]:
    pieces: list[Piece] = []
    for message in messages:
        is_assistant = message["role"] == "assistant"
        pieces += [
            (f"<|im_start|>{message['role']}\n", False),
            (message["content"], is_assistant),
            ("<|im_end|>", is_assistant),
            ("\n", False),
        ]
    return pieces


def _llama(messages: Messages) -> list[Piece]:
    pieces: list[Piece] = [("<|begin|>", False)]
    for message in messages:
        is_assistant = message["role"] == "assistant"
        pieces += [
            (f"<|header|>{message['role']}<|end_header|>\n\n", False),
            (message["content"].strip(), is_assistant),
            ("<|eot|>", is_assistant),
        ]
    return pieces


def _gemma(messages: Messages) -> list[Piece]:
    pieces: list[Piece] = [("<bos>", False)]
    for message in messages:
        is_assistant = message["role"] == "assistant"
        role = "model" if is_assistant else message["role"]
        pieces += [
            (f"<turn>{role}\n", False),
            (message["content"].strip(), is_assistant),
            ("<end_of_turn>", is_assistant),
            ("\n", False),
        ]
    return pieces


def _thinking(messages: Messages) -> list[Piece]:
    """Only the last turn shows its reasoning, so an earlier turn that had some is not what was written."""
    pieces: list[Piece] = []
    for number, message in enumerate(messages):
        last = number == len(messages) - 1
        reasoning = message.get("reasoning_content") or ""
        counts = message["role"] == "assistant" and (last or not reasoning)
        pieces.append((f"<|im_start|>{message['role']}\n", False))
        if message["role"] == "assistant" and last:
            pieces.append((f"<think>\n{reasoning}\n</think>\n\n", bool(reasoning)))
        pieces += [(message["content"], counts), ("<|im_end|>", counts), ("\n", False)]
    return pieces


ORACLES: dict[str, Callable[[Messages], list[Piece]]] = {
    "chatml": _chatml,
    "llama": _llama,
    "gemma": _gemma,
    "thinking": _thinking,
    "generation": _generation,
}


def oracle(family: str, messages: Messages) -> tuple[list[int], list[int]]:
    """Return token ids and loss mask of a conversation without control strings in its text."""
    pieces = ORACLES[family](messages)
    text = "".join(piece for piece, _ in pieces)
    supervised = [is_assistant for piece, is_assistant in pieces for _ in piece]
    encoded = small_tokenizer(family)(text, add_special_tokens=False, return_offsets_mapping=True)
    mask = [int(end > start and all(supervised[start:end])) for start, end in encoded["offset_mapping"]]
    return encoded["input_ids"], mask
