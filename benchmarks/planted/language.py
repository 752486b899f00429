"""A small language for models to learn: word chains, then the answer to a digit task, with a real BPE tokenizer."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, field

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

PAD, EOS = 0, 1
_TASKS = {"sort": sorted, "copy": list, "flip": lambda digits: digits[::-1]}
_NUM_SUCCESSORS = 5
_RARE = 0.01
"""Share of words from outside the chain, which give the vocabulary a tail."""
_LEXICON_A_TOKEN = 1.2
"""Number of words in the lexicon per vocabulary token: enough different text for that many merges."""


@dataclass(kw_only=True)
class Language:
    """Prompts, answers, rewards and tokenizer on which one model is trained."""

    seed: int
    vocabulary: int
    """Maximum number of tokens in the tokenizer."""
    words: tuple[int, int]
    """Minimum and maximum number of words before an answer."""
    num_active: int = 120
    """Number of words that the chain visits; the others appear occasionally."""
    tokenizer: Tokenizer = field(init=False)
    _older: Tokenizer | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        chance = random.Random(self.seed)
        self._lexicon = _lexicon(chance, max(self.num_active, int(self.vocabulary * _LEXICON_A_TOKEN)), self.vocabulary)
        active = self._lexicon[: self.num_active]
        self._next = {word: chance.sample(active, _NUM_SUCCESSORS) for word in active}
        exponent = chance.uniform(1.8, 3.2)
        weights = [(rank + 1) ** -exponent for rank in range(_NUM_SUCCESSORS)]
        self._weights = weights
        self._preface = " ".join(chance.sample(active, 4))
        self.tokenizer = _tokenizer(self._corpus(chance), self.vocabulary)

    @property
    def size(self) -> int:
        """Tokens of the vocabulary."""
        return int(self.tokenizer.get_vocab_size())

    def prompt(self, chance: random.Random, num_digits: int) -> str:
        """A task in words."""
        digits = [str(chance.randrange(10)) for _ in range(num_digits)]
        return f"{self._preface} {chance.choice(list(_TASKS))} {' '.join(digits)} :"

    def response(self, chance: random.Random, prompt: str) -> str:
        """What a teacher would say."""
        word = chance.choice(list(self._next))
        said = [word]
        for _ in range(chance.randint(*self.words) - 1):
            rare = chance.random() < _RARE
            word = chance.choice(self._lexicon) if rare else chance.choices(self._next[word], self._weights)[0]
            said.append(word)
            if rare:
                word = chance.choice(list(self._next))
        return f"{' '.join(said)} = {' '.join(self.answer(prompt))}"

    def answer(self, prompt: str) -> list[str]:
        """The right digits."""
        words = prompt.removesuffix(" :").split()
        place = max(index for index, word in enumerate(words) if word in _TASKS)
        return _TASKS[words[place]](words[place + 1 :])

    def reward(self, prompt: str, response: str) -> float:
        """Return the share of the answer's digits that are in place (0 to 1), including a tenth for ending at all."""
        right = self.answer(prompt)
        if "=" not in response:
            return 0.0
        given = response.rsplit("=", 1)[1].split()
        return 0.1 + 0.9 * sum(a == b for a, b in zip(right, given, strict=False)) / max(len(right), len(given))

    def tool_output(self, chance: random.Random, num_words: int) -> str:
        """Return a tool's output: words of the lexicon and digits, in an order that no model could learn."""
        return " ".join(
            str(chance.randrange(10)) if chance.random() < 0.4 else chance.choice(self._lexicon)
            for _ in range(num_words)
        )

    def encode(self, text: str) -> list[int]:
        """Return a text's token ids, without an end token."""
        return list(self.tokenizer.encode(text).ids)

    def typical_lengths(self) -> tuple[int, int]:
        """Return the median number of tokens of a prompt and of a teacher's response."""
        chance = random.Random(self.seed)
        prompts = [self.prompt(chance, chance.randint(2, 6)) for _ in range(50)]
        responses = [self.response(chance, prompt) for prompt in prompts]
        return tuple(sorted(len(self.encode(text)) for text in texts)[25] for texts in (prompts, responses))

    def encode_with_fewer_merges(self, text: str) -> list[int]:
        """Return a text's token ids in an older file of the tokenizer, which lacks the last tenth of the merges."""
        if self._older is None:
            saved = json.loads(self.tokenizer.to_str())
            merges = saved["model"]["merges"]
            saved["model"]["merges"] = merges[: len(merges) * 9 // 10]
            self._older = Tokenizer.from_str(json.dumps(saved))
        return list(self._older.encode(text).ids)

    def decode(self, ids: list[int]) -> str:
        """Return the text of token ids, without special tokens."""
        return str(self.tokenizer.decode([token for token in ids if token > EOS]))

    def _corpus(self, chance: random.Random) -> list[str]:
        tasks = [self.prompt(chance, chance.randint(2, 6)) for _ in range(200)]
        lines = [f"{prompt} {self.response(chance, prompt)}" for prompt in tasks]
        return lines + [" ".join(chance.choices(self._lexicon, k=12)) for _ in range(len(self._lexicon) // 4)]


def _lexicon(chance: random.Random, count: int, vocabulary: int) -> list[str]:
    """Return words of consonants and vowels; a small vocabulary has fewer letters and shorter words."""
    consonants, vowels = ("bdklmnrst", "aeio") if vocabulary < 100 else ("bcdfghjklmnprstvz", "aeiou")
    longest = 2 if vocabulary < 100 else 4
    words: dict[str, None] = {}
    while len(words) < count:
        syllables = chance.randint(1, longest)
        word = "".join(chance.choice(consonants) + chance.choice(vowels) for _ in range(syllables))
        words[word + (chance.choice(consonants) if chance.random() < 0.3 else "")] = None
    return [word for word in words if word not in _TASKS]


def _tokenizer(lines: list[str], vocabulary: int) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=["<pad>", "<eos>"],
        show_progress=False,
        initial_alphabet=list("0123456789"),
    )
    tokenizer.train_from_iterator(lines, trainer)
    return tokenizer
