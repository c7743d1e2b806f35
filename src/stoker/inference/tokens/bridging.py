"""What goes between the model's last turn and its next one. Pure functions.

A history is continued by what was sampled, never by tokenising it again: the ids that are known,
then the *bridge*, which closes the turn where the model did not and adds what came since. Shared by
servers that render (``http.rendering``) and by folders we render ourselves (``tokens.renderer``).
"""

from collections.abc import Sequence
from typing import TypeVar

from stoker.model.generation import GenerateRequest, Role

_Element = TypeVar("_Element")


def bridge(
    known: Sequence[int], before: Sequence[int], whole: Sequence[int], turn_end: tuple[int, ...]
) -> list[int] | None:
    """Return what follows ``known`` in a history that grew from ``before`` to ``whole``.

    First the part of the turn's end that was not sampled (all of it where the turn was cut), then
    what the template adds. ``None``: ``whole`` does not begin with ``before``.
    """
    if list(whole[: len(before)]) != list(before):
        return None
    return unsampled(known, [*turn_end, *whole[len(before) :]], turn_end)


def unsampled(known: Sequence[int], tail: Sequence[int], turn_end: tuple[int, ...]) -> list[int]:
    """Return ``tail``, which begins with a turn's end, without what ``known`` ends with of it."""
    return list(tail[sampled_of(known, turn_end) :])


def sampled_of(known: Sequence[int], turn_end: tuple[int, ...]) -> int:
    """Return how many ids of a turn's end ``known`` ends with."""
    return next(
        count
        for count in range(min(len(turn_end), len(known)), -1, -1)
        if tuple(known[len(known) - count :]) == turn_end[:count]
    )


def common_tail(one: Sequence[_Element], two: Sequence[_Element]) -> Sequence[_Element]:
    """Return what both end with."""
    count = 0
    while count < min(len(one), len(two)) and one[-1 - count] == two[-1 - count]:
        count += 1
    return one[len(one) - count :]


def answered_messages(request: GenerateRequest) -> int:
    """Return how many messages lead up to and include the model's last turn."""
    turns = [at for at, message in enumerate(request.messages, 1) if message.role is Role.ASSISTANT]
    return turns[-1] if turns else 0
