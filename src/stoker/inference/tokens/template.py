"""A model folder's chat template: messages to text.

Renders as the templates' authors expect of Hugging Face's loader: a sandboxed Jinja with trimmed
blocks, ``raise_exception``, ``tojson`` that keeps characters, loop controls and the ``generation``
tag. One thing is ours: the day that ``strftime_now`` tells is always the same (the one Llama's
templates fall back to), since a history must read tomorrow as it read today.
"""

import datetime as dt
import json
from collections.abc import Mapping
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from stoker.errors import ConfigInvalid, ModelRefused
from stoker.inference.tokens.messages import Fields, plain_messages, template_messages
from stoker.model.generation import Message, Role, ToolSpec

TODAY = dt.date(2024, 7, 26)
"""The day every template is told it is."""

_TOOL_USE = "tool_use"


class ChatTemplate:
    """The compiled templates of one folder: ``default``, and ``tool_use`` where there is one."""

    def __init__(self, sources: Mapping[str, str], specials: Mapping[str, str]) -> None:
        environment = _environment()
        try:
            self._templates = {
                name: environment.from_string(text) for name, text in sources.items()
            }
        except jinja2.TemplateError as error:
            raise ConfigInvalid(
                f"the chat template cannot be read ({error}); nothing was started. Use the "
                "template the model was published with"
            ) from error
        self._specials = dict(specials)
        self._try_out()

    def _try_out(self) -> None:
        """Refuse a template that renders nothing at all, before a run has begun."""
        asked: Fields = {"role": "user", "content": "a"}
        try:
            self.rendered([asked], None, open_turn=True)
        except ModelRefused as error:
            try:  # some want a system message
                self.rendered([{"role": "system", "content": "a"}, asked], None, open_turn=True)
            except ModelRefused:
                raise ConfigInvalid(f"{error}; nothing was started") from error

    def text(
        self, history: tuple[Message, ...], tools: tuple[ToolSpec, ...], *, open_turn: bool
    ) -> str:
        """Return ``history`` as text; ``open_turn`` adds what opens the model's turn.

        Raises:
            ModelRefused: the template cannot render these messages.
        """
        offered = template_tools(tools)
        try:
            return self.rendered(template_messages(history), offered, open_turn=open_turn)
        except ModelRefused:
            if all(message.role is not Role.TOOL and not message.tool_calls for message in history):
                raise
        return self.rendered(plain_messages(history), offered, open_turn=open_turn)

    def rendered(
        self, messages: list[Fields], tools: list[Fields] | None, *, open_turn: bool
    ) -> str:
        """Return messages in a template's own form as text; raises as ``text``."""
        name = _TOOL_USE if tools and _TOOL_USE in self._templates else "default"
        try:
            return self._templates[name].render(
                {
                    **self._specials,
                    "messages": messages,
                    "tools": tools,
                    "documents": None,
                    "add_generation_prompt": open_turn,
                }
            )
        except (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError) as error:
            raise ModelRefused(
                f"the model's chat template cannot render this history of {len(messages)} "
                f"messages ({type(error).__name__}: {error}); roles: "
                f"{[message.get('role') for message in messages][-8:]}"
            ) from error


def template_tools(tools: tuple[ToolSpec, ...]) -> list[Fields] | None:
    """Return ``tools`` as templates take them; ``None`` where none are offered."""
    return [
        {
            "type": "function",
            "function": {
                "name": tool.name,
                "description": tool.description,
                "parameters": tool.parameters or {"type": "object", "properties": {}},
            },
        }
        for tool in tools
    ] or None


class _Generation(jinja2.ext.Extension):
    """``{% generation %}``: marks what the model writes; its content is rendered as it is."""

    tags = {"generation"}  # noqa: RUF012 - Jinja's own form

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        """Return what stands between the tags."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> jinja2.Environment:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _json
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = TODAY.strftime
    return environment


def _json(value: object, **options: Any) -> str:  # noqa: ANN401 - what json.dumps takes
    return json.dumps(value, **{"ensure_ascii": False, **options})


def _refuse(message: str) -> str:
    raise jinja2.TemplateError(message)
