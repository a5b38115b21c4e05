"""A byte-level tokenizer for seeded models: one token a byte and a few marks, built from nothing, the same on every machine.

ids 0..255 are the bytes, then the marks, then reserved ids up to the model's vocabulary, so that every id the model can sample has a token.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pipeline.digest import write_json
from pipeline.errors import UserError

MARKS = ["<|end|>", "<|pad|>", "<|system|>", "<|user|>", "<|assistant|>"]
END, PAD = 256, 257
# What ends a response: <|end|> and the bytes that ended texts long before: NUL, ETX, EOT, newline. An untrained model samples one of
# these at about 1.7 % a token, so responses of a few dozen tokens come out in mixed lengths.
STOP_IDS = [END, 0x00, 0x03, 0x04, 0x0A]
# One mark per message and no names or newlines: prompts stay a few tokens long.
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ '<|end|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def byte_symbols() -> list[str]:
    """The printable character that stands for each byte in byte-level vocabularies: itself where printable, else the next from U+0100."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


def write_byte_tokenizer(folder: Path, vocab_size: int) -> None:
    """Write tokenizer.json and tokenizer_config.json for `vocab_size` ids. Raises UserError when they are too few."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    smallest = 256 + len(MARKS)
    if vocab_size < smallest:
        raise UserError(f"checkpoint.architecture.vocab_size={vocab_size}: the byte-level tokenizer needs at least {smallest}")
    tokenizer = Tokenizer(models.BPE(vocab={symbol: byte for byte, symbol in enumerate(byte_symbols())}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    reserved = [f"<|reserved_{i}|>" for i in range(vocab_size - smallest)]
    tokenizer.add_special_tokens([AddedToken(mark, special=True, normalized=False) for mark in MARKS + reserved])
    tokenizer.save(str(folder / "tokenizer.json"))
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
        "eos_token": MARKS[0],
        "pad_token": MARKS[1],
    }
    write_json(folder / "tokenizer_config.json", config)
