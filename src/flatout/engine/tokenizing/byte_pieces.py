"""Train a byte-level BPE tokenizer on the train split, for models that generate text.
Decoding the tokens of a text restores the text exactly."""

from __future__ import annotations

from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from flatout.engine.machine.environment import tokenizer_parallelism
from flatout.engine.tokenizing.word_pieces import sampled, without_long_words

PAD, START, END = SPECIAL_TOKENS = ("<|pad|>", "<|start|>", "<|end|>")
LONGEST_WORD = 1_000
"""Maximum length of a word in bytes. The training ignores longer words (e.g. DNA)."""
NUM_BYTES = 256
FORMAT_VERSION = 1
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ bos_token + message['role'] + '\\n' }}"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + eos_token }}{% endgeneration %}"
    "{% else %}{{ message['content'] + eos_token }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ bos_token + 'assistant\\n' }}{% endif %}"
)
"""Messages start with the role and end with the end token, which stops generation."""
OPTIONS: dict[str, Any] = {
    "pad_token": PAD,
    "bos_token": START,
    "eos_token": END,
    "clean_up_tokenization_spaces": False,
    "chat_template": CHAT_TEMPLATE,
}
"""Arguments for the tokenizer class of transformers."""


def train_byte_pieces(texts: Any, vocab_size: int) -> Tokenizer:
    """Return a tokenizer that is trained on an Arrow column of texts, with all bytes in
    its vocabulary. It adds a start token to each text, but no end token, because the
    text may be a prompt."""
    tokenizer = Tokenizer(models.BPE())
    words = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = without_long_words(words, LONGEST_WORD)
    trainer = trainers.BpeTrainer(
        vocab_size=max(vocab_size, NUM_BYTES + len(SPECIAL_TOKENS)),
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    with tokenizer_parallelism(True):
        tokenizer.train_from_iterator(sampled(texts), trainer)
    tokenizer.pre_tokenizer, tokenizer.decoder = words, decoders.ByteLevel()
    tokenizer.post_processor = around(tokenizer, end=False)
    return tokenizer


def around(tokenizer: Tokenizer, *, end: bool) -> processors.TemplateProcessing:
    """Return a post-processor that adds a start token before each text and, if `end` is
    True, an end token after it."""
    last = f" {END}" if end else ""
    return processors.TemplateProcessing(
        single=f"{START} $A{last}",
        pair=f"{START} $A{last} {START} $B{last}",
        special_tokens=[(name, tokenizer.token_to_id(name)) for name in (START, END)],
    )
