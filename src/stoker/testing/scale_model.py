"""The model of ``stoker bench scale``: answers at once, with as much as was said to it last."""

from stoker.inference.policy import Answer
from stoker.model.generation import GenerateRequest


def answer(request: GenerateRequest) -> Answer:
    """Say as many characters as the last message has."""
    return Answer(text="a" * len(str(request.messages[-1].content)))
