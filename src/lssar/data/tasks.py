"""Synthetic tasks that ask for something far back: passkey, needles in real text, associative recall, selective copy.

A `Sample` is a context of token ids and queries about it, each with its answer and wrong answers to weigh it against.
`TASKS` names the tasks; `TaskMaker` builds samples for one tokenizer. All contexts of a task and length have the same
number of tokens, as have all its prompts, so that samples batch without padding. `TrainingDocuments` fills windows of
a training stream with such samples, each with all its queries answered.

Everything is made of random numbers from the caller, so the same generator gives the same sample on every machine.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from lssar.data.stream import TokenStream
from lssar.data.tokenizers import Tokenizer

FILLER = " The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
"""What the passkey is hidden in (Mohtashami and Jaggi 2023)."""

SMALLEST = 10_000
"""Numbers have five digits: this one and those below ten times it."""
NEEDLES, PAIRS, ITEMS = 5, 16, 8
"""Default contents of one context: numbered words, pairs to recall, tokens to copy."""
WRONG = 9
"""Random wrong answers beside a passkey: chance is one in ten."""

# Five letters each: the same number of bytes, and mostly one token in word-piece vocabularies.
_WORDS = (
    "apple beach bread brick brown candy chain chair chest child china clock cloud coast coins color couch cover cream "
    "crown dance dress drink earth eagle field flame flash fleet floor forge frame front fruit ghost glass glove grain "
    "grape grass green guard heart honey horse hotel house juice knife lemon light lunch maple march metal money month "
    "motor mouse mouth music night north ocean olive onion organ paint panel paper party peace phone photo piano pilot "
    "pizza plain plane plant plate point pound power press price pride prize queen radio ranch razor river robin salad "
    "scale scene scout sheep sheet shell shirt shore skirt smile smoke snake solar south space spice spoon sport staff "
    "stage stamp steam steel stone store storm story sugar table theme tiger title toast tower track trade trail train "
    "trunk truth uncle union voice wagon waste watch water whale wheat wheel white woman world yacht youth"
)
WORDS = re.findall(r"\w+", _WORDS)


@dataclass(frozen=True)
class Query:
    prompt: np.ndarray
    """What follows the context."""
    answer: np.ndarray
    others: tuple[np.ndarray, ...]
    """Wrong answers that are as likely to one who has not read the context; empty where there are none."""
    depths: tuple[float, ...]
    """Where in the context the answer stands, 0 its start and 1 its end: one number, or one a token of the answer."""


@dataclass(frozen=True)
class Sample:
    context: np.ndarray
    queries: tuple[Query, ...]

    def document(self, order: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        """Context, then the queries in this order, each with its answer; and which of its tokens are answers."""
        asked = [part for i in order for part in (self.queries[i].prompt, self.queries[i].answer)]
        tokens = np.concatenate([self.context, *asked])
        answers = np.zeros(len(tokens), bool)
        end = len(self.context)
        for prompt, answer in zip(asked[::2], asked[1::2]):
            end += len(prompt) + len(answer)
            answers[end - len(answer) : end] = True
        return tokens, answers


Background = Callable[[np.random.Generator, int], np.ndarray]
"""Called with a generator and a number: that many consecutive tokens of real text, from a random place."""


def background_of(stream: TokenStream, eot: int) -> Background:
    """Text from random places of a stream: documents strung together without their eot, over its end to its start."""

    def text(rng: np.random.Generator, count: int) -> np.ndarray:
        start = int(rng.integers(len(stream)))
        parts: list[np.ndarray] = []
        missing = count
        while missing > 0:
            piece = stream.read(start, missing)
            parts.append(piece[piece != eot])
            missing -= len(parts[-1])
            start = (start + len(piece)) % len(stream)
        return np.concatenate(parts).astype(np.int64) if parts else np.zeros(0, np.int64)

    return text


class TaskMaker:
    """Samples of every task for one tokenizer."""

    def __init__(
        self, tokenizer: Tokenizer, background: Background | None = None, passkey_in_background: bool = False
    ) -> None:
        """`background` is needed for needles alone; passkeys may be hidden in it too, in place of the usual filler."""
        self.tokenizer, self.background = tokenizer, background
        self.passkey_in_background = passkey_in_background
        self._pieces: dict[str, np.ndarray] = {}
        self._shortest: dict[tuple[str, int | None], int] = {}

    def make(
        self, task: str, rng: np.random.Generator, length: int, depths: Sequence[float], *, asked: int = 1,
        load: int | None = None, others: bool = True,
    ) -> Sample:  # fmt: skip
        """A sample whose context and `asked` answered queries fit in `length` tokens.

        depths: where the needles stand, and for the passkey a single one; recall and copy spread theirs evenly.
        load: needles, pairs or items in the context, if not the default.
        others: whether wrong answers are wanted.
        """
        if task not in TASKS:
            raise ValueError(f"unknown retrieval task {task!r}; known: {', '.join(TASKS)}")
        context = length - asked * self.room(task, load)
        return TASKS[task](self, rng, context, depths, load, others)

    def room(self, task: str, load: int | None = None) -> int:
        """Tokens kept for one prompt and its answer."""
        match task:
            case "passkey":
                return len(self._text("\nWhat is the pass key? The pass key is")) + self.number_tokens
            case "needles":
                return len(self._needle_prompt(self.words[0])) + self.number_tokens
            case "recall":
                return 2
            case _:
                return 1 + (load or ITEMS)

    def answer_tokens(self, task: str) -> int:
        """The most that an answer takes."""
        return {"passkey": self.number_tokens, "needles": self.number_tokens, "recall": 1, "copy": ITEMS}[task]

    def most(self, task: str) -> int:
        """The largest number of distinct needles, pairs or items in one context."""
        of_recall = min(map(len, self.symbols[:2])) if task == "recall" else 0
        return {"passkey": 1, "needles": len(self.words), "recall": of_recall, "copy": ITEMS}[task]

    def shortest(self, task: str, load: int | None = None) -> int:
        """Tokens that a sample with one query needs at least."""
        if (task, load) not in self._shortest:
            self._shortest[task, load] = self._count_shortest(task, load)
        return self._shortest[task, load]

    def _count_shortest(self, task: str, load: int | None) -> int:
        inside = {
            "passkey": 1 + len(self._passkey(SMALLEST)),
            "needles": 1 + (load or NEEDLES) * len(self._needle(self.words[0], SMALLEST)),
            "recall": 1 + 2 * (load or PAIRS),
            "copy": 1 + (load or ITEMS),
        }
        numbers = {"passkey": 2, "needles": load or NEEDLES}.get(task, 0)
        slack = numbers * (self.number_tokens - len(self._number(SMALLEST)))  # word-piece vocabularies: numbers differ
        return inside[task] + slack + self.room(task, load)

    # words, numbers and symbols of this tokenizer

    def _text(self, text: str) -> np.ndarray:
        if text not in self._pieces:
            self._pieces[text] = self.tokenizer.encode(text).astype(np.int64)
        return self._pieces[text]

    def _number(self, number: int) -> np.ndarray:
        return self.tokenizer.encode(f" {number}").astype(np.int64)

    @staticmethod
    def _numbers(rng: np.random.Generator, count: int) -> list[int]:
        return [SMALLEST + int(n) for n in rng.choice(9 * SMALLEST, count, replace=False)]

    @cached_property
    def number_tokens(self) -> int:
        """The most that a number of five digits takes."""
        return max(len(self._number(n)) for n in self._numbers(np.random.default_rng(0), 500))

    @cached_property
    def words(self) -> list[str]:
        """Words of one encoded length, so that all prompts have the same length."""
        sizes = {word: len(self._needle_prompt(word)) for word in WORDS}
        usual = Counter(sizes.values()).most_common(1)[0][0]
        return [word for word, size in sizes.items() if size == usual]

    @cached_property
    def symbols(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Single tokens for keys, for values and for noise: printable characters, or words where there are enough."""
        found: list[int] = []
        words = self.tokenizer.vocab_size > 4096
        for token in range(self.tokenizer.vocab_size):
            if token == self.tokenizer.eot:
                continue
            text = self.tokenizer.decode([token])
            bare = text.strip()
            if (words and len(bare) >= 3 and bare.isascii() and bare.isalpha() and text != bare) or (
                not words and len(text) == 1 and text.isascii() and text.isprintable() and text != " "
            ):
                found.append(token)
            if len(found) == 1536:
                break
        if len(found) < 3 * PAIRS:
            raise ValueError(
                f"{self.tokenizer.name} has {len(found)} tokens that are characters or words; recall needs {3 * PAIRS}"
            )
        return tuple(np.array(found[part::3]) for part in range(3))  # type: ignore[return-value]

    # the tasks

    def _passkey(self, number: int) -> np.ndarray:
        parts = [self._text("\nThe pass key is"), self._number(number), self._text(". Remember it.")]
        return np.concatenate([*parts, self._number(number), self._text(" is the pass key.\n")])

    def passkey(
        self, rng: np.random.Generator, size: int, depths: Sequence[float], load: int | None, others: bool
    ) -> Sample:
        numbers = self._numbers(rng, 1 + WRONG if others else 1)
        context = self._hide(self._filler(rng), [self._passkey(numbers[0])], depths[:1], size, "passkey")
        answer, *wrong = (self._number(n) for n in numbers)
        prompt = self._text("\nWhat is the pass key? The pass key is")
        return Sample(context, (Query(prompt, answer, tuple(wrong), (depths[0],)),))

    def _filler(self, rng: np.random.Generator) -> Callable[[int], np.ndarray]:
        """The text that passkeys are hidden in."""
        background = self.background
        if not self.passkey_in_background:
            return lambda count: np.resize(self._text(FILLER), count)
        if background is None:
            raise ValueError("passkeys in real text need a background, and there is none")
        return lambda count: background(rng, count)

    def _needle_prompt(self, word: str) -> np.ndarray:
        return self._text(f"\nThe number of {word} is")

    def _needle(self, word: str, number: int) -> np.ndarray:
        return np.concatenate([self._needle_prompt(word), self._number(number), self._text(".\n")])

    def needles(
        self, rng: np.random.Generator, size: int, depths: Sequence[float], load: int | None, others: bool
    ) -> Sample:
        if self.background is None:
            raise ValueError("needles need real text to be hidden in, and there is none")
        count = load or len(depths)
        if len(depths) != count:
            depths = [(i + 0.5) / count for i in range(count)]
        words = [self.words[i] for i in rng.choice(len(self.words), count, replace=False)]
        numbers = self._numbers(rng, count)
        needles = [self._needle(word, number) for word, number in zip(words, numbers)]
        background = self.background
        context = self._hide(lambda tokens: background(rng, tokens), needles, depths, size, "needles")
        answers = [self._number(n) for n in numbers]
        queries = [
            Query(self._needle_prompt(words[i]), answers[i], _without(answers, i) if others else (), (depths[i],))
            for i in range(count)
        ]
        return Sample(context, tuple(queries))

    def _hide(
        self, text: Callable[[int], np.ndarray], needles: list[np.ndarray], depths: Sequence[float], size: int,
        task: str,
    ) -> np.ndarray:  # fmt: skip
        """The document's eot and `size` - 1 tokens of text with the needles in it, each at its share of the text."""
        room = size - 1 - sum(map(len, needles))
        if room < 0:
            raise ValueError(
                f"{task}: a context of {size} tokens is too short for {len(needles)} of "
                f"{max(map(len, needles))} tokens; ask for longer contexts or other tasks"
            )
        filler = text(room)
        order = np.argsort(depths, kind="stable")
        parts, done = [np.array([self.tokenizer.eot])], 0
        for i in order:
            at = round(depths[i] * room)
            parts += [filler[done:at], needles[i]]
            done = at
        return np.concatenate([*parts, filler[done:]]).astype(np.int64)

    def recall(
        self, rng: np.random.Generator, size: int, depths: Sequence[float], load: int | None, others: bool
    ) -> Sample:
        """Zoology's multi-query associative recall: key and value tokens in noise; a key asks for its value."""
        keys, values, noise = self.symbols
        count = load or PAIRS
        self._fits("recall", size, 2, count)
        chosen, given = rng.choice(keys, count, replace=False), rng.choice(values, count, replace=False)
        context = self._with_eot(rng.choice(noise, size - 1))
        places = self._places(rng, size, count, 2)
        context[places], context[places + 1] = chosen, given
        bins = max(1, len(depths))
        answers = [given[i : i + 1] for i in range(count)]
        depth = [((i * bins // count + 0.5) / bins,) for i in range(count)]
        queries = [
            Query(chosen[i : i + 1], answers[i], _without(answers, i) if others else (), depth[i]) for i in range(count)
        ]
        return Sample(context, tuple(queries))

    def copy(
        self, rng: np.random.Generator, size: int, depths: Sequence[float], load: int | None, others: bool
    ) -> Sample:
        """Mamba's selective copying: a few tokens far apart in blanks, to be repeated in order after a mark."""
        _, values, noise = self.symbols
        count = load or ITEMS
        self._fits("copy", size, 1, count)
        items = rng.choice(values, count)
        context = self._with_eot(np.full(size - 1, noise[0]))
        context[self._places(rng, size, count, 1)] = items
        depth = tuple((i + 0.5) / count for i in range(count))
        return Sample(context, (Query(noise[1:2], items, (), depth),))

    def _with_eot(self, tokens: np.ndarray) -> np.ndarray:
        return np.concatenate([[self.tokenizer.eot], tokens]).astype(np.int64)

    def _fits(self, task: str, size: int, each: int, count: int) -> None:
        if size - 1 < each * count:
            raise ValueError(
                f"{task}: a context of {size} tokens is too short for {count} of {each}; ask for longer ones"
            )

    @staticmethod
    def _places(rng: np.random.Generator, size: int, count: int, each: int) -> np.ndarray:
        """Where `count` things of `each` tokens stand: one in each equal share of the context after its eot."""
        edges = 1 + np.linspace(0, size - 1, count + 1).astype(np.int64)
        low, high = edges[:-1], edges[1:]
        return low + (rng.random(count) * (high - low - each + 1)).astype(np.int64)


def _without(answers: list[np.ndarray], i: int) -> tuple[np.ndarray, ...]:
    return (*answers[:i], *answers[i + 1 :])


TASKS: dict[str, Callable[..., Sample]] = {
    "passkey": TaskMaker.passkey,
    "needles": TaskMaker.needles,
    "recall": TaskMaker.recall,
    "copy": TaskMaker.copy,
}


class TrainingDocuments:
    """Windows of a training stream that ask for retrieval: documents of every length from the shortest to a window's.

    The documents are made as the evaluation's are, from other random numbers, at any depth and with as much or as
    little to remember as fits, all of it asked for in random order.
    """

    def __init__(self, maker: TaskMaker, tasks: Sequence[str], seed: int) -> None:
        for task in tasks:
            if task not in TASKS:
                raise ValueError(f"unknown retrieval task {task!r}; known: {', '.join(TASKS)}")
        if not tasks:
            raise ValueError("a share of retrieval documents needs at least one task")
        self.maker, self.tasks, self.seed = maker, list(tasks), seed

    def check(self, length: int) -> None:
        """ValueError if a window of `length` tokens is too short for one of the tasks."""
        for task in self.tasks:
            if (least := self._shortest(task, length)) > length:
                raise ValueError(
                    f"a window of {length} tokens is too short for {task}, which takes {least} with "
                    f"{self.maker.tokenizer.name}; train on longer windows, or without that task"
                )

    def identity(self) -> dict[str, Any]:
        tokenizer = f"{self.maker.tokenizer.name}, {self.maker.tokenizer.vocab_size} ids"
        return {"retrieval_tasks": self.tasks, "retrieval_seed": self.seed, "retrieval_tokenizer": tokenizer}

    def window(self, number: int, length: int) -> tuple[np.ndarray, np.ndarray]:
        """The window with this number: `length` tokens of documents one after the other, the last one cut.

        And which tokens count as targets: the answers alone. The rest is noise, or filler, or text out of its place.
        """
        self.check(length)
        rng = np.random.default_rng([self.seed, number, 0x5E7])
        parts: list[np.ndarray] = []
        counted: list[np.ndarray] = []
        left = length
        while left > 0:
            document, counts = self._document(rng, length, left)
            parts.append(document[:left])
            counted.append(counts[:left])
            left -= len(parts[-1])
        return np.concatenate(parts), np.concatenate(counted)

    def _document(self, rng: np.random.Generator, length: int, left: int) -> tuple[np.ndarray, np.ndarray]:
        """One that fits into what is left of the window, if any does."""
        task = self.tasks[rng.integers(len(self.tasks))]
        least = self._shortest(task, length)
        # Every octave of lengths gets about the same share of the tokens: short documents teach what to do (most of
        # their tokens matter), long ones at what distance.
        most = max(left, least)
        size = int(1 / (1 / least + rng.random() * (1 / most - 1 / least)))
        size = most if size > 0.7 * most else size
        load = int(rng.integers(1, self._capacity(task, size), endpoint=True))
        sample = self.maker.make(
            task, rng, size, rng.random(load).tolist(), asked=self._asked(task, load), load=load, others=False
        )  # fmt: skip
        return sample.document(rng.permutation(len(sample.queries)).tolist())

    @staticmethod
    def _asked(task: str, load: int) -> int:
        return load if task in ("needles", "recall") else 1

    def _shortest(self, task: str, length: int) -> int:
        """Tokens of the shortest document in windows of `length`."""
        return max(self._least(task, 1), length // 32)

    def _least(self, task: str, load: int) -> int:
        return self.maker.shortest(task, load) + (self._asked(task, load) - 1) * self.maker.room(task, load)

    def _capacity(self, task: str, size: int) -> int:
        """The most needles, pairs or items in a document of this size."""
        one, two = self._least(task, 1), self._least(task, 2)
        fits = 1 + (size - one) // (two - one) if two > one else 1
        return max(1, min(self.maker.most(task), fits))
