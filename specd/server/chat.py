"""Chat templates: messages to one text, as transformers renders them, in a sandbox. No torch.

The template comes with the model (or from the operator), never from a request. What requests do control, the messages
and the keyword arguments, must not be able to write special tokens: every piece of their text that reads like one is
masked by a private-use character before the template runs, and `Tokenizer.encode_chat` puts it back as ordinary text.
"""

from __future__ import annotations

import datetime
import functools
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import jinja2
import jinja2.meta
import jinja2.nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from specd.errors import ModelError, RequestError
from specd.server.context import MAX_TEXT_CHARS
from specd.server.reasoning import CLOSE, OPEN
from specd.text import RenderedChat, compile_any

_PRIVATE_USE = (range(0xF0000, 0xFFFFE), range(0xE000, 0xF900), range(0x100000, 0x10FFFE))
_SLICE = 1 << 16  # characters of a text that are looked at in one go
_RESERVED = frozenset({"messages", "tools", "add_generation_prompt", "bos_token", "eos_token"})
# What a template can raise by itself on data it was not written for. Anything else is a fault of ours.
_TEMPLATE_ERRORS = (
    jinja2.TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
)


class ChatTooLongError(RequestError):
    """A chat of more characters than a template may write; `begun` is as far as it got."""

    def __init__(self, message: str, begun: RenderedChat) -> None:
        super().__init__(message, code="template_error", param="messages")
        self.begun = begun


class _TooLongError(Exception):
    def __init__(self, begun: str) -> None:
        super().__init__()
        self.begun = begun


class ChatTemplate:
    """One compiled chat template; immutable, safe to use from several threads. ModelError when it does not compile."""

    def __init__(
        self,
        source: str,
        *,
        bos_token: str,
        eos_token: str,
        special_tokens: Sequence[str],
        max_chars: int = MAX_TEXT_CHARS,
        max_seconds: float = 10.0,
        now: Callable[[], datetime.datetime] = datetime.datetime.now,
    ) -> None:
        """special_tokens: texts that only the template may write.

        max_chars: of the output, and of the text of one message.
        max_seconds is looked at whenever the template writes something.
        """
        environment = _Sandbox(max_chars)
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda form: now().strftime(form)
        try:
            self._template = environment.from_string(source)
            names = jinja2.meta.find_undeclared_variables(environment.parse(source))
        except (jinja2.TemplateError, RecursionError) as error:
            raise ModelError(f"the chat template does not compile: {error}") from error
        self.variables = frozenset(names) - _RESERVED - environment.globals.keys()  # what keyword arguments can set
        self.reads_tools = "tools" in names
        self.thinks = OPEN in source or CLOSE in source
        self._tokens = {"bos_token": bos_token, "eos_token": eos_token}
        self._special_tokens = tuple(token for token in special_tokens if token)
        self._reserved_text = source + bos_token + eos_token
        self._max_chars = max_chars
        self._max_seconds = max_seconds

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final: bool = False,
        tools: Sequence[Mapping[str, Any]] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> RenderedChat:
        """The chat as the template writes it. Content parts are joined by a newline before the template sees them.

        tools: in OpenAI's shape; a template that does not read them leaves them out.
        continue_final: the text ends where the content of the last message does, so that it can be continued.
        kwargs become template variables; one the template does not read changes nothing. RequestError: code
        `template_error` when the template refuses the messages or its output is too large, `unsupported_parameter`
        for a content part that is not text or a kwarg that would replace what the server sets.
        """
        extra = dict(kwargs or {})
        for name in extra.keys() & _RESERVED:
            path = f"chat_template_kwargs.{name}"
            raise RequestError(f"{path} is set by the server", code="unsupported_parameter", param=path)
        flat = [_flatten(message, f"messages[{index}]") for index, message in enumerate(messages)]
        for long in (one["content"] for one in flat if len(one["content"]) > self._max_chars):
            raise self._too_long(RenderedChat(long))
        try:
            mask = _Mask(self._special_tokens, (flat, extra, tools), self._reserved_text)
            context = {**mask.apply(extra), **self._tokens, "messages": mask.apply(flat)}
            context["tools"] = mask.apply(tools) or None  # templates ask for one or the other
        except RecursionError as error:
            message = "the messages are nested too deeply"
            raise RequestError(message, code="template_error", param="messages") from error
        context["add_generation_prompt"] = add_generation_prompt
        end = mask.unused() if continue_final else ""
        if continue_final:
            context["messages"][-1]["content"] += end
        try:
            text = self._generate(context)
        except _TooLongError as error:
            raise self._too_long(RenderedChat(error.begun, mask.texts)) from error
        except _TEMPLATE_ERRORS as error:
            reason = str(error).translate(mask.texts)[:500]
            message = f"the chat template refused the messages: {reason or type(error).__name__}"
            raise RequestError(message, code="template_error", param="messages") from error
        if continue_final:
            if text.count(end) != 1:
                message = "this model's chat template does not write the last message once: it cannot be continued"
                raise RequestError(message, code="template_error", param="continue_final_message")
            text = text[: text.index(end)]
        return RenderedChat(text, mask.texts)

    def _too_long(self, begun: RenderedChat) -> ChatTooLongError:
        return ChatTooLongError(f"the chat is longer than {self._max_chars} characters", begun)

    def _generate(self, context: Mapping[str, Any]) -> str:
        deadline = time.monotonic() + self._max_seconds
        pieces: list[str] = []
        length = 0
        for piece in self._template.generate(context):
            pieces.append(piece)
            length += len(piece)
            if length > self._max_chars:
                raise _TooLongError("".join(pieces))
            if time.monotonic() > deadline:
                raise SecurityError(f"it ran for more than {self._max_seconds:g} seconds")
        return "".join(pieces)


def render(
    messages: Sequence[Mapping[str, Any]],
    *,
    template: str,
    bos_token: str,
    eos_token: str,
    special_tokens: Sequence[str],
    add_generation_prompt: bool = True,
    kwargs: Mapping[str, Any] | None = None,
) -> RenderedChat:
    """`ChatTemplate(...).render(...)`; the compiled template is kept. Errors of both."""
    compiled = _compiled(template, bos_token, eos_token, tuple(special_tokens))
    return compiled.render(messages, add_generation_prompt=add_generation_prompt, kwargs=kwargs)


@functools.lru_cache(maxsize=8)
def _compiled(source: str, bos_token: str, eos_token: str, special_tokens: tuple[str, ...]) -> ChatTemplate:
    return ChatTemplate(source, bos_token=bos_token, eos_token=eos_token, special_tokens=special_tokens)


class _Mask:
    """Replaces special-token text by private-use characters that occur nowhere in the input, and knows the way back.

    A tail that could become a special token together with what the template writes after it is masked too, except in
    keys and roles, which templates compare.
    """

    def __init__(self, special_tokens: Sequence[str], data: Any, reserved: str) -> None:
        self._pattern = compile_any(special_tokens)
        self._longest = max(map(len, special_tokens), default=0)
        self._tails = {token[:n] for token in special_tokens for n in range(1, len(token))}
        self._longest_tail = max(map(len, self._tails), default=0)
        self.texts: dict[int, str] = {}
        self._marks: dict[str, str] = {}
        used = set(reserved)
        for text in _strings(data):
            for at in range(0, len(text), _SLICE):
                used.update(text[at : at + _SLICE])
        self._free = (chr(code) for block in _PRIVATE_USE for code in block if chr(code) not in used)

    def apply(self, value: Any) -> Any:
        """A copy of JSON-like data with every string in it masked, keys included."""
        match value:
            case str():
                return self._tail(self._whole(value))
            case Mapping():
                return {self._name(key): self._name(v) if key == "role" else self.apply(v) for key, v in value.items()}
            case list() | tuple():
                return [self.apply(item) for item in value]
            case _:
                return value

    def unused(self) -> str:
        """A character that is not in the input, for marking a place in the output."""
        mark = next(self._free, None)
        if mark is None:
            raise RequestError("the messages use every private-use character", code="template_error")
        return mark

    def _name(self, value: Any) -> Any:
        return self._whole(value) if isinstance(value, str) else self.apply(value)

    def _whole(self, text: str) -> str:
        """Slice by slice: one call of `sub` for a text of millions of characters would let no other thread run."""
        if self._pattern is None:
            return text
        pieces: list[str] = []
        at = 0
        while at < len(text):
            begun = at + _SLICE  # matches that begin before it are seen whole
            for match in self._pattern.finditer(text, at, begun + self._longest):
                if match.start() >= begun:
                    break
                pieces += text[at : match.start()], self._mark(match.group())
                at = match.end()
            pieces.append(text[at:begun])
            at = max(at, begun)
        return "".join(pieces)

    def _tail(self, text: str) -> str:
        for length in range(min(self._longest_tail, len(text)), 0, -1):
            if text[-length:] in self._tails:
                return text[:-length] + self._mark(text[-length:])
        return text

    def _mark(self, text: str) -> str:
        mark = self._marks.get(text)
        if mark is None:
            self._marks[text] = mark = self.unused()
            self.texts[ord(mark)] = text
        return mark


def _strings(value: Any) -> Iterator[str]:
    match value:
        case str():
            yield value
        case Mapping():
            for key, item in value.items():
                yield from _strings(key)
                yield from _strings(item)
        case list() | tuple():
            for item in value:
                yield from _strings(item)


def _flatten(message: Mapping[str, Any], path: str) -> dict[str, Any]:
    """The message with its content as one string: text parts joined by a newline, null as ""."""
    content = message.get("content")
    if content is None:
        return {**message, "content": ""}
    if isinstance(content, str):
        return dict(message)
    if not isinstance(content, (list, tuple)):
        where = f"{path}.content"
        raise RequestError(f"{where} must be a string or a list of parts", code="invalid_type", param=where)
    texts = []
    for index, part in enumerate(content):
        text = part.get("text") if isinstance(part, Mapping) and part.get("type") == "text" else None
        if not isinstance(text, str):
            where = f"{path}.content[{index}]"
            raise RequestError(f"{where} is not a text part", code="unsupported_parameter", param=where)
        texts.append(text)
    return {**message, "content": "\n".join(texts)}


class _Generation(Extension):
    """`{% generation %}...{% endgeneration %}` marks what is trained on; for serving it is its content."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Sandbox(ImmutableSandboxedEnvironment):
    """jinja2's sandbox with the settings that chat templates are written for, and bounds on `*` and `**`."""

    intercepted_binops = frozenset({"*", "**"})

    def __init__(self, max_chars: int) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation])
        self._max_chars = max_chars

    def call_binop(self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "**" and abs(right) > 64:
            raise SecurityError(f"the exponent {right} is too large")
        if operator == "*":
            for sequence, count in ((left, right), (right, left)):
                repeated = isinstance(sequence, (str, list, tuple)) and isinstance(count, int)
                if repeated and len(sequence) * count > self._max_chars:
                    raise SecurityError(f"a repetition is longer than {self._max_chars}")
        return super().call_binop(context, operator, left, right)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # jinja2's own filter escapes HTML, which would change prompts.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
