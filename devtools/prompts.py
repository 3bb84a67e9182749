"""Deterministic prompts of an exact number of tokens."""

import random
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer

_SENTENCE = (
    ("The", "This", "That", "Every", "Another"),
    ("old", "young", "small", "great", "blue", "red", "quiet", "strong", "new", "long"),
    ("man", "woman", "river", "city", "house", "dog", "king", "school", "ship", "garden"),
    ("sees", "knows", "likes", "needs", "finds", "follows", "makes", "wants"),
    ("the", "a", "his", "her", "our", "one"),
    ("good", "bad", "dark", "high", "low", "warm", "cold", "green", "white", "black"),
    ("book", "road", "tree", "door", "story", "song", "stone", "light", "table", "friend"),
)
"""Each word, with a space before it, is one token of the SmolLM2 vocabulary; so is the full stop."""


@dataclass(frozen=True)
class Prompt:
    """One prompt as text and as the token ids that the text encodes to."""

    text: str
    token_ids: list[int]


class PromptMaker:
    """Makes prompts with the tokenizer of one model folder."""

    def __init__(self, model_dir: Path) -> None:
        self._tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))

    def prompt_of(self, num_tokens: int, seed: int = 0) -> Prompt:
        """A prompt of exactly `num_tokens` tokens; another seed gives another text from the first words on."""
        rng = random.Random(seed)  # noqa: S311
        words: list[str] = []
        while len(words) < num_tokens:
            words += [f" {rng.choice(choices)}" for choices in _SENTENCE]
            words.append(".")
        text = "".join(words[:num_tokens])
        token_ids: list[int] = self._tokenizer.encode(text).ids
        if len(token_ids) != num_tokens:
            raise ValueError(f"the vocabulary splits our words: {len(token_ids)} tokens instead of {num_tokens}")
        return Prompt(text, token_ids)
