"""How many tokens a prompt has, before anybody has tokenised it.

Exact where its ids are known; the rest is characters ÷ a ratio learnt from answers that say how
long their prompts were.
"""

from stoker.model.generation import GenerateRequest, Generation

_CHARACTERS_PER_TOKEN = 4.0
_MESSAGE_TOKENS = 4
"""Marks around each message."""
_SMOOTH = 0.05
_ID_BYTES = 4


class PromptSizes:
    """Estimates, and the ratio they stand on."""

    def __init__(self) -> None:
        self._per_token = _CHARACTERS_PER_TOKEN

    def estimate(self, request: GenerateRequest) -> int:
        """Return the tokens of ``request``'s prompt, with those its turn begins with."""
        begun = request.begun
        return self._prompt(request) + (begun.token_count if begun is not None else 0)

    def _prompt(self, request: GenerateRequest) -> int:
        if request.begun is not None and request.begun.prompt_ids:
            return len(request.begun.prompt_ids) // _ID_BYTES
        characters, marks = _unknown(request)
        return len(request.prompt_ids) // _ID_BYTES + marks + int(characters / self._per_token)

    def learn(self, request: GenerateRequest, generation: Generation) -> int:
        """Learn from an answer; return the tokens its prompt had."""
        if not generation.prompt_ids:
            return self._prompt(request)
        tokens = len(generation.prompt_ids) // _ID_BYTES
        characters, marks = _unknown(request)
        new = tokens - len(request.prompt_ids) // _ID_BYTES - marks
        if new > 0 and characters > 0:
            self._per_token += _SMOOTH * (max(0.25, characters / new) - self._per_token)
        return tokens


def _unknown(request: GenerateRequest) -> tuple[int, int]:
    """Return the characters whose ids are not known, and the tokens of marks around them."""
    if request.prompt_ids and not request.known_messages:
        return 0, 0
    known = request.known_messages
    messages = request.messages[known:]
    tools = 0 if known else sum(len(str(tool.parameters)) for tool in request.tools)
    characters = sum(len(message.content) for message in messages) + tools
    return characters, _MESSAGE_TOKENS * len(messages)
