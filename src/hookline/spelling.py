"""Whether a name is another one mistyped: close enough to be sure, because a helper of the user's own must
not be refused.

Letters are compared word by word. A slip in a long word is hardly ever another word; in a short one it often
is (`test_step` and `text_step`, `state_dict` and `stats_dict`), so there only swapped, doubled and left-out
inner letters count. Singular and plural are different names.
"""

from __future__ import annotations

import functools

LONG_WORD = 6
MOST_SLIPS = 2


def misspelling_of(name: str, known: tuple[str, ...]) -> str:
    """Return the known name that `name` is a misspelling of; an empty string if it is none."""
    if name in known:
        return ""
    by_letters, by_length = _index(known)
    words = name.split("_")
    similar = (right for right, meant in by_length.get(len(words), ()) if _is_misspelled(words, meant))
    return by_letters.get(_joined(name)) or next(similar, "")


@functools.lru_cache(maxsize=32)
def _index(known: tuple[str, ...]) -> tuple[dict[str, str], dict[int, list[tuple[str, list[str]]]]]:
    """The names by their letters, and their words by how many there are."""
    by_length: dict[int, list[tuple[str, list[str]]]] = {}
    for name in known:
        by_length.setdefault(name.count("_") + 1, []).append((name, name.split("_")))
    return {_joined(name): name for name in reversed(known)}, by_length


def _joined(name: str) -> str:
    """`onStepEnd`, `On_step_end` and `on_stepend` are all `on_step_end` but for case and underscores."""
    return name.replace("_", "").lower()


def _is_misspelled(words: list[str], right: list[str]) -> bool:
    wrong = [(word, meant) for word, meant in zip(words, right, strict=True) if word != meant]
    return 0 < len(wrong) <= MOST_SLIPS and all(_is_slip(word, meant) for word, meant in wrong)


def _is_slip(word: str, meant: str) -> bool:
    """Whether one slip of the keyboard makes the one out of the other."""
    if word == f"{meant}s" or meant == f"{word}s":
        return False
    if len(word) == len(meant):
        wrong = [index for index, pair in enumerate(zip(word, meant, strict=True)) if pair[0] != pair[1]]
        first, last = wrong[0], wrong[-1]
        are_swapped = (
            len(wrong) == 2 and last == first + 1 and word[first : last + 1] == meant[last] + meant[first]
        )
        return are_swapped or (len(wrong) == 1 and len(meant) >= LONG_WORD)
    longer, shorter = sorted((word, meant), key=len, reverse=True)
    at = next(
        (index for index, pair in enumerate(zip(longer, shorter, strict=False)) if pair[0] != pair[1]),
        len(shorter),
    )
    if longer[at + 1 :] != shorter[at:]:
        return False
    is_doubled = at > 0 and longer[at] == longer[at - 1]
    is_inside = 0 < at < len(longer) - 1
    if longer is word:  # `prepared_data` and `eval_dataloader` have a letter more at the end
        return is_doubled or (is_inside and len(meant) >= LONG_WORD)
    return is_doubled or len(meant) >= LONG_WORD or (is_inside and len(meant) >= 4)
