"""Renders a chat as text by a sandboxed template in Jinja, and finds what the assistant wrote. Torch-free.

A template is an untrusted file: it sees the messages and the special tokens alone, it cannot change them, and its
output is bounded. It has no clock, because the samples of a run are a pure function of its files.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

from jinja2 import Environment, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Macro

from meshwright.core.data.chat.sandbox import OTHER_TEMPLATE, BoundedSandbox, LimitExceeded, bounded

MAX_TEMPLATE_BYTES = 128 << 10
"""Size limit of a template: Python takes up to 4 KiB for a byte of it while it is compiled."""
ASSISTANT = "assistant"

Span = tuple[int, int]
"""The first character and the end of a part of a text."""
Messages = Sequence[Mapping[str, Any]]

DEFAULT_TEMPLATE = """\
{% for message in messages %}
{{ '<|im_start|>' + message['role'] + '\\n' }}
{%- if message['role'] == 'assistant' %}
{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}
{%- else %}
{{ message['content'] + '<|im_end|>' }}
{%- endif %}
{{ '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{ '<|im_start|>assistant\\n' }}
{%- endif %}
"""
"""ChatML, for a tokenizer that brings no template."""


class GenerationBlocks(Extension):
    """The tag `{% generation %}`, which marks what the assistant wrote."""

    tags = {"generation"}  # noqa: RUF012  the interface of Jinja

    def __init__(self, environment: Environment) -> None:
        super().__init__(environment)
        self.length, self.spans = 0, list[Span]()
        environment.extend(generation=self)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("mark"), [], [], body).set_lineno(line)

    def mark(self, caller: Macro) -> str:
        text = str(caller())
        self.spans.append((self.length, self.length + len(text)))
        return text


class RefusedTemplate(ValueError):
    """The template does what no template may; `hint` says what to do. The message names it and the limit."""

    def __init__(self, message: str, hint: str) -> None:
        super().__init__(message)
        self.hint = hint


class ChatTemplate:
    """A chat template; `special` are the special tokens that it may name, such as `bos_token`, and `name` is for
    messages. ValueError is raised for a template that cannot be compiled, and for a chat that it refuses.
    """

    def __init__(
        self, source: str = DEFAULT_TEMPLATE, special: Mapping[str, str] | None = None, name: str = "ChatML"
    ) -> None:
        self.source, self.special, self.name = source, dict(special or {}), name
        self.environment = BoundedSandbox([GenerationBlocks])
        self.blocks: GenerationBlocks = self.environment.generation  # type: ignore[attr-defined]
        if len(source.encode(errors="replace")) > MAX_TEMPLATE_BYTES:
            raise ValueError(f"the template has more than {MAX_TEMPLATE_BYTES:,} bytes")
        try:
            self.template = self.environment.from_string(source)
        except Exception as error:  # noqa: BLE001  Python may refuse the code that Jinja makes of a template
            reason = " ".join(str(error).split())[:200] or type(error).__name__
            raise ValueError(f"the template cannot be compiled: {reason}") from None

    @cached_property
    def marks_generation(self) -> bool:
        """Whether the template itself says what the assistant wrote."""
        return "endgeneration" in self.source

    def render(self, messages: Messages, prompt: bool = False) -> tuple[str, list[Span]]:
        """The text of a chat, and the parts inside of generation blocks. With `prompt`, the text ends where the
        assistant is about to write.
        """
        self.environment.start()
        return self._render(messages, prompt)

    def _render(self, messages: Messages, prompt: bool = False) -> tuple[str, list[Span]]:
        parts: list[str] = []
        self.blocks.length, self.blocks.spans = 0, []
        self.environment.start_rendering()
        values = {"messages": messages, "add_generation_prompt": prompt} | self.special
        try:
            for part in self.template.generate(values):
                parts.append(part)
                self.blocks.length += len(part)
                bounded(self.blocks.length)
        except (LimitExceeded, SecurityError) as error:
            hint = error.hint if isinstance(error, LimitExceeded) else OTHER_TEMPLATE
            raise RefusedTemplate(f"{str(error).rstrip('.')} (chat template {self.name})", hint) from None
        except Exception as error:  # noqa: BLE001  a template may raise anything
            raise ValueError(f"the template fails: {type(error).__name__}: {str(error)[:200]}") from None
        return "".join(parts), self.blocks.spans

    def render_chat(self, messages: Messages) -> tuple[str, list[Span]]:
        """The text of a whole chat, and the parts that the assistant wrote: those inside of generation blocks, or what
        each answer adds to the text that ends with the assistant's prompt.
        """
        text, spans = self.render(messages)
        if not self.marks_generation:
            spans = list(self._answers(messages, text))
        return text, spans

    def _answers(self, messages: Messages, text: str) -> Iterator[Span]:
        for index, message in enumerate(messages):
            if message["role"] == ASSISTANT:
                before, _ = self._render(messages[:index], prompt=True)
                after, _ = self._render(messages[: index + 1])
                if not (text.startswith(after) and after.startswith(before)):
                    raise ValueError(
                        f"the template renders the beginning of message {index} differently in a longer chat, so what "
                        "the assistant wrote is not known; mark it by {% generation %} blocks in the template"
                    )
                yield len(before), len(after)
