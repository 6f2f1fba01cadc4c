"""What prompts are made of: token ids drawn by seed, or words where a server takes only text.

Called by loadtests/load/workloads.py and traces.py. Inside, a prompt is token ids in either case,
so that which prefixes repeat is known exactly; `prompt` turns them into what is sent. Must not:
need a tokeniser; a text's number of tokens is therefore the server's to tell, and about one a word.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

FIRST_ID = 1000
"""Below it tokenisers keep special ids, single bytes and reserved places."""
LAST_IDS = 1000
"""So many at the end are left out too: there some keep special and image ids, and padding."""

_WORDS = tuple(
    # A list literal would be a line a word.
    """
    able above across after again along also among answer apple around back bank bear beat become
    before begin behind bell below best better between bird black blue board boat body book both
    bottom box boy bread bridge bright bring brother build busy call calm carry case catch cause
    center change check child circle city class clean clear climb close cloud coast cold color
    come common cook cool copy corn corner cost count country course cover cross cut dance dark
    day deep desk door down draw dream dress drink drive drop dry early earth east easy edge egg
    eight end engine enough even evening ever every eye face fact fair fall family farm fast
    father feel field fight fill final find fine finger finish fire first fish floor flow flower
    fly follow food foot force forest form forward four free fresh friend front fruit full game
    garden gate give glass gold good grand grass great green ground group grow guess half hand
    happy hard head hear heart heat heavy help high hill history hold home hope horse hot hour
    house human hundred idea inside iron island job join jump just keep kind king kitchen know
    lady lake land large last late laugh lead learn leave left less letter level lie life light
    line list listen little long look lost loud love low machine main make many map mark market
    matter meal mean measure meet member metal middle mile milk mind minute money month moon more
    morning most mother mountain mouth move music name near neck need never new next night nine
    noise north note number object ocean offer oil old only open order other outside over own
    page paint pair paper parent part party pass past path pay people perfect person picture
    piece place plain plan plant play point poor power press price print public pull push put
    """.split()  # noqa: SIM905
)


@dataclass(frozen=True, slots=True)
class TokenIds:
    """Ids from least to most, both included, sent as they are."""

    least: int
    most: int

    def __post_init__(self) -> None:
        if not 0 <= self.least < self.most:
            raise ValueError(f"token ids from {self.least} to {self.most} are no range")

    @property
    def text(self) -> str:
        """For a run's record."""
        return f"token ids {self.least} to {self.most}"

    def draw(self, rng: random.Random, tokens: int) -> tuple[int, ...]:
        return tuple(rng.choices(range(self.least, self.most + 1), k=tokens))

    def prompt(self, ids: Iterable[int]) -> tuple[int, ...]:
        """What is sent."""
        return tuple(ids)


@dataclass(frozen=True, slots=True)
class Words:
    """Common English words, sent as text; most tokenisers make one token of each."""

    @property
    def text(self) -> str:
        """For a run's record."""
        return "text, about one token a word"

    def draw(self, rng: random.Random, tokens: int) -> tuple[int, ...]:
        return tuple(rng.choices(range(len(_WORDS)), k=tokens))

    def prompt(self, ids: Iterable[int]) -> str:
        """What is sent. Prompts with equal first ids have equal first words."""
        return " ".join(_WORDS[each] for each in ids)


Vocabulary = TokenIds | Words


def token_ids(vocabulary_size: int) -> TokenIds:
    """The ids of a vocabulary of this size that no tokeniser is known to keep for itself.

    Raises ValueError where none would be left.
    """
    most = vocabulary_size - LAST_IDS - 1
    if most <= FIRST_ID:
        raise ValueError(
            f"a vocabulary of {vocabulary_size} is too small to leave out {FIRST_ID} ids at the "
            f"begin and {LAST_IDS} at the end: give the range of ids yourself"
        )
    return TokenIds(FIRST_ID, most)


def vocabulary_size(card: Mapping[str, object]) -> int | None:
    """As the server tells it, by its entry in /v1/models; None where it does not.

    No server tells it outright, but vLLM's and ours name the model's folder (`root`), whose
    config.json does where that folder is on this machine.
    """
    root = card.get("root")
    if not isinstance(root, str):
        return None
    try:
        config = json.loads((Path(root) / "config.json").read_text(encoding="utf-8"))
        size = config.get("vocab_size") or config.get("text_config", {}).get("vocab_size")
    except (OSError, ValueError, AttributeError):
        return None
    return size if isinstance(size, int) else None
