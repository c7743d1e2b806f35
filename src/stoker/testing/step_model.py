"""The model of ``stoker bench step``: answers at once, so that a step is all overhead."""

from stoker.inference.policy import Answer
from stoker.model.generation import GenerateRequest


def answer(request: GenerateRequest) -> Answer:
    """Say something short."""
    del request
    return Answer(text="go")
