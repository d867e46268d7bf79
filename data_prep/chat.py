"""Chat template -> tokens and turns, as inference with the same template would see them.

Nothing here knows a template: masks come from renderings (data_prep/masks.py), and what does not come out exactly is
refused, conversation by conversation (`ChatError`), never guessed at.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
import jinja2.meta

from data_prep.masks import Aligner, ChatError, Encoded, Message, Rendered, Span, find_turns
from kvshot_ds.config.preparation import TemplateConfig
from kvshot_ds.errors import ConfigError

__all__ = ["ChatError", "ChatTemplate", "Encoded", "Message"]

_PROBE = "kvshotprobe"
_QUESTION = {"role": "user", "content": _PROBE}
_BATCH = 512  # conversations tokenised in one call: enough for every core, and their records do not pile up
_THINK = ("<think>", "</think>")
_TODAY = datetime(2024, 7, 26)  # what Llama 3.1 takes for today where it cannot ask

Tools = Sequence[Mapping[str, Any]]


class ChatTemplate:
    """The chat template of one tokenizer, or of prep.template.jinja, under the options of prep.template.

    end_id: the token that closes an assistant turn; special_ids: all special tokens; digest: sha256 of the template's source.
    A template that asks for the date gets the same one each day, so that a rerun gives the same tokens.
    Raises ConfigError if there is no template, if it is no valid Jinja, knows no enable_thinking although prep.template.thinking
    is set, or marks no end of an assistant turn.
    """

    def __init__(self, tokenizer: Any, options: TemplateConfig = TemplateConfig()) -> None:  # noqa: B008 - frozen
        self.tokenizer, self.options = tokenizer, options
        if not tokenizer.is_fast:
            raise ConfigError(f"the tokenizer of {tokenizer.name_or_path} records no offsets; expected a fast one (tokenizer.json in its folder)")
        self._sources = _sources(tokenizer, options)
        self.digest = hashlib.sha256(json.dumps(self._sources, sort_keys=True).encode()).hexdigest()
        self._knows = frozenset[str]().union(*(_names(source, options) for source in self._sources.values()))
        self._marked = any("endgeneration" in source for source in self._sources.values())
        self._tokens = dict(tokenizer.special_tokens_map)
        if options.thinking is not None and "enable_thinking" not in self._knows:
            raise ConfigError("prep.template.thinking is set, but the chat template knows no enable_thinking; remove the option")
        special = {id: token for id, token in tokenizer.added_tokens_decoder.items() if token.special}
        self._special = {token.content: id for id, token in special.items()}
        self._openings = {text[:2] for text in self._special}
        self.special_ids = frozenset(special)
        hard = {id: t.content for id, t in special.items() if not (t.lstrip or t.single_word or t.normalized)}
        self._aligner = Aligner(self.special_ids, hard, self._ids)
        self._thinks = any(_THINK[1] in source for source in self._sources.values())
        try:
            self._check(options.system or "", "prep.template.system")
            asked, _ = self._render(self._ready([_QUESTION]), prompt=True)
            answered, _ = self._render(self._ready([{"role": "user", "content": "?"}, {"role": "assistant", "content": _PROBE}]))
        except ChatError as error:
            raise ConfigError(f"the chat template does not render a question and an answer: {error}") from None
        self._prompt_thinks = asked.rstrip().endswith(_THINK[0])
        self.end_id = self._find_end(answered)
        self._end = tokenizer.convert_ids_to_tokens(self.end_id)

    def prompt(self, messages: Sequence[Message], tools: Tools = ()) -> list[int]:
        """Tokens fed to the model to have `messages` answered: rendered with the generation prompt. Raises ChatError."""
        return self._ids(self._render(self._ready(messages, tools), tools, prompt=True)[0])

    def open_user_turn(self) -> list[int]:
        """Tokens up to where a user's first words would stand (Magpie, arXiv 2406.08464). Raises ConfigError if a template rewrites them."""
        text, probe, _ = self._render(self._ready([_QUESTION]))[0].partition(_PROBE)
        if not probe:
            raise ConfigError("the chat template does not show a user's words as they stand; prompt synthesis is not possible (prep.synthesis.count=0)")
        return self._ids(text)

    def text(self, answer: Sequence[int]) -> str:
        """The words of a generated answer, without special tokens and outer blanks; a character cut in two at its end is dropped."""
        return self.tokenizer.decode(answer, skip_special_tokens=True, clean_up_tokenization_spaces=False).rstrip("\ufffd").strip()

    def parse_answer(self, answer: Sequence[int]) -> dict[str, Any]:
        """The assistant message of generated tokens: {"role", "content"}, and "reasoning_content" where a template that knows
        <think> lets the target think. Thinking that was not finished leaves the content empty."""
        names = self.tokenizer.convert_ids_to_tokens(list(answer))
        kept = [token for token, name in zip(answer, names, strict=True) if token not in self.special_ids or name in _THINK]
        text = self.tokenizer.decode(kept, skip_special_tokens=False, clean_up_tokenization_spaces=False).rstrip("\ufffd").strip()
        if not self._thinks:
            return {"role": "assistant", "content": text}
        reasoning, closed, content = text.partition(_THINK[1])
        if not closed and not (text.startswith(_THINK[0]) or self._prompt_thinks):
            return {"role": "assistant", "content": text}
        reasoning = reasoning.strip().removeprefix(_THINK[0]).strip()
        return {"role": "assistant", "content": content.strip()} | ({"reasoning_content": reasoning} if reasoning else {})

    def with_system(self, messages: Sequence[Message]) -> list[Message]:
        """`messages` with prep.template.system in front, if they have no system prompt."""
        if self.options.system is None or (messages and messages[0]["role"] == "system"):
            return list(messages)
        return [{"role": "system", "content": self.options.system}, *messages]

    def encode(self, messages: Sequence[Message], tools: Tools = ()) -> Encoded:
        """A finished conversation, up to its last assistant turn. Raises ChatError if the rendering cannot be split exactly."""
        [found] = self.encode_many([(messages, tools)])
        if isinstance(found, ChatError):
            raise found
        return found

    def encode_many(self, conversations: Sequence[tuple[Sequence[Message], Tools]]) -> list[Encoded | ChatError]:
        """`encode` of each (messages, tools), in order; tokenised in one call, on all cores unless TOKENIZERS_PARALLELISM=false."""
        found: list[Encoded | ChatError] = []
        for at in range(0, len(conversations), _BATCH):
            plans = [self._finished(messages, tools) for messages, tools in conversations[at : at + _BATCH]]
            found += [row if isinstance(row, ChatError) else row.trimmed() for row in self._align(plans)]
        return found

    def encode_answered(self, messages: Sequence[Message], answer: Sequence[int], unfinished: Collection[int] = (), tools: Tools = ()) -> Encoded:
        """A conversation whose last answer is given as the tokens the target wrote, so they stand exactly as it wrote them.

        messages: everything before that answer. unfinished: earlier turns (1-based) that were cut at the token limit; the
        end token their rendering adds is not the target's and stays unsupervised. Raises ChatError.
        """
        ready = self._ready(messages, tools)
        text, marks = self._render(ready, tools, prompt=True)
        rendered = Rendered(text, ())
        if self.options.supervise == "all":
            rendered = self._plan(ready, tools, text, marks, unfinished)
        [head] = self._align([rendered])
        if isinstance(head, ChatError):
            raise head
        turn = 1 + sum(m["role"] == "assistant" for m in messages)
        return Encoded([*head.tokens, *answer], [*head.turn, *[turn] * len(answer)], head.left_out)

    def _finished(self, messages: Sequence[Message], tools: Tools) -> Rendered | ChatError:
        last = max((i for i, m in enumerate(messages) if m["role"] == "assistant"), default=-1)
        if last < 0:
            return ChatError("no assistant turn")
        try:
            ready = self._ready(messages[: last + 1], tools)
            text, marks = self._render(ready, tools, prompt=False)
            return self._plan(ready, tools, text, marks)
        except ChatError as reason:
            return reason

    def _plan(self, messages: list[Message], tools: Tools, text: str, marks: tuple[Span, ...] | None, unfinished: Collection[int] = ()) -> Rendered:
        def render(part: Sequence[Message], prompt: bool) -> str:
            return self._render(part, tools, prompt)[0]

        turns, left_out = find_turns(messages, text, render, self._close, self.options.supervise == "last", unfinished)
        return Rendered(text, turns, marks, left_out)

    def _align(self, plans: Sequence[Rendered | ChatError]) -> list[Encoded | ChatError]:
        texts = [plan.text for plan in plans if isinstance(plan, Rendered)]
        if not texts:
            return [plan for plan in plans if isinstance(plan, ChatError)]
        # templates write their own beginning-of-text token
        batch = self.tokenizer(texts, add_special_tokens=False, return_attention_mask=False, return_token_type_ids=False, verbose=False)
        rows = iter(zip(batch["input_ids"], batch.encodings, strict=True))
        found: list[Encoded | ChatError] = []
        for plan in plans:
            if isinstance(plan, ChatError):
                found.append(plan)
                continue
            tokens, encoding = next(rows)
            try:
                found.append(self._aligner.encode(plan, tokens, encoding))
            except ChatError as reason:
                found.append(reason)
        return found

    def _close(self, own: str, start: int) -> Span | None:
        """Characters of the end token of the turn that ends `own` and starts at `start`: the first one, as contents hold none.

        A turn may be closed by another token than answers are (a tool call by <|eom_id|>): then the last one, if nothing follows it.
        """
        at = own.find(self._end, start)
        if at >= 0:
            return at, at + len(self._end)
        at, text = max((own.rfind(text, start), text) for text in self._special)
        return (at, at + len(text)) if at >= 0 and not own[at + len(text) :].strip() else None

    def _ready(self, messages: Sequence[Message], tools: Tools = ()) -> list[Message]:
        """Messages as templates expect them, with the system prompt; refuses what the template would leave out or misread."""
        try:
            return self._checked(messages, tools)
        except RecursionError:
            raise ChatError("a tool or a tool call is nested too deeply") from None

    def _checked(self, messages: Sequence[Message], tools: Tools) -> list[Message]:
        ready = [message if len(message) == 2 else _plain(message) for message in messages]
        for n, message in enumerate(ready, 1):
            for text in [message.get("content", "")] if len(message) == 2 else _strings(message):
                self._check(text, f"message {n}")
            if message.get("tool_calls") and not any("tool_calls" in source for source in self._sources.values()):
                raise ChatError(f"message {n} calls tools, which the chat template does not show")
        if tools and "tools" not in self._knows:
            raise ChatError("the conversation has tools, which the chat template does not show")
        for text in _strings(tools):
            self._check(text, "a tool")
        return self.with_system(ready)

    def _check(self, text: str, where: str) -> None:
        """Refuses text that would become a special token: it could open or close a turn."""
        if any(opening in text for opening in self._openings):
            special = next((special for special in self._special if special in text), None)
            if special is not None:
                raise ChatError(f"{where} contains the special token {special!r} as text")

    def _render(self, messages: Sequence[Message], tools: Tools = (), prompt: bool = False) -> tuple[str, tuple[Span, ...] | None]:
        """(text, spans inside the template's {% generation %} marks or None if it has none). Raises ChatError."""
        template = _compiled(self._sources["tool_use" if tools and "tool_use" in self._sources else "default"])
        values: dict[str, Any] = {**self._tokens, "strftime_now": _TODAY.strftime, "documents": None}
        values |= {"messages": messages, "tools": list(tools) or None, "add_generation_prompt": prompt}
        if self.options.thinking is not None:
            values["enable_thinking"] = self.options.thinking
        try:
            return _marked(template, values) if self._marked else (template.render(values), None)
        except (jinja2.TemplateError, ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError) as error:
            raise ChatError(f"the chat template refuses it: {error}") from None

    def _ids(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False, verbose=False).input_ids

    def _find_end(self, answered: str) -> int:
        """The first special token after an assistant's words."""
        _, probe, rest = answered.partition(_PROBE)
        if not probe:
            raise ConfigError("the chat template does not show an assistant's words as they stand; name another one in prep.template.jinja")
        end = next((token for token in self._ids(rest) if token in self.special_ids), None)
        if end is None:
            raise ConfigError("the chat template closes an assistant turn with no special token; such templates are not supported")
        return end


def _sources(tokenizer: Any, options: TemplateConfig) -> dict[str, str]:
    """Jinja sources by name: "default", and "tool_use" where a tokenizer has one of its own for conversations with tools."""
    if options.jinja is not None:
        path = options.jinja.expanduser()
        try:
            return {"default": path.read_text(encoding="utf-8")}
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"prep.template.jinja={path}: not readable as a Jinja template: {error}") from None
    own = tokenizer.chat_template
    sources = dict(own) if isinstance(own, Mapping) else {"default": own}
    if not sources.get("default"):
        raise ConfigError(
            f"the tokenizer of {tokenizer.name_or_path} has no chat template; expected an instruct model, a chat_template.jinja in its folder, "
            "or a template named in prep.template.jinja"
        )
    return {name: source for name, source in sources.items() if name in ("default", "tool_use")}


def _compiled(source: str) -> Any:
    """`source` in transformers' sandbox, with its filters and extensions; compiled once per process."""
    from transformers.utils.chat_template_utils import _compile_jinja_template

    return _compile_jinja_template(source)


def _names(source: str, options: TemplateConfig) -> set[str]:
    """The variables a template reads. Raises ConfigError if it is no valid Jinja."""
    try:
        return jinja2.meta.find_undeclared_variables(_compiled(source).environment.parse(source))
    except jinja2.TemplateError as error:
        where = "the tokenizer's chat template" if options.jinja is None else f"prep.template.jinja={options.jinja}"
        line = f", line {error.lineno}" if isinstance(error, jinja2.TemplateSyntaxError) else ""
        raise ConfigError(f"{where}{line}: not a valid Jinja template: {error}") from None


def _marked(template: Any, values: dict[str, Any]) -> tuple[str, tuple[Span, ...]]:
    """The rendering, and the spans of it inside {% generation %} marks."""
    blocks: list[str] = []
    marks: list[Span] = []
    with template.environment.activate_tracker(blocks, marks):
        for block in template.generate(values):  # the tracker counts the characters of what is in the list so far
            blocks.append(block)
    return "".join(blocks), tuple(marks)


def _plain(message: Message) -> dict[str, Any]:
    """A message as templates expect it: nothing that is None, arguments of calls as objects, thinking under both its names."""
    plain = {key: value for key, value in message.items() if value is not None}
    if "reasoning_content" in plain:
        plain["thinking"] = plain["reasoning_content"]
    if plain.get("tool_calls"):
        plain["tool_calls"] = [_call(call) for call in plain["tool_calls"]]
    return plain


def _call(call: Any) -> Any:
    """A tool call whose arguments are an object, not OpenAI's string of JSON, which templates would quote once more."""
    if not isinstance(call, Mapping):
        return call
    if isinstance(call.get("function"), Mapping):
        return {**call, "function": _call(call["function"])}
    try:
        arguments = json.loads(call["arguments"]) if isinstance(call.get("arguments"), str) else None
    except ValueError:
        return call
    return {**call, "arguments": arguments} if isinstance(arguments, dict) else call


def _strings(value: Any) -> Iterable[str]:
    """Every string in nested lists and mappings, keys included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _strings(key)
            yield from _strings(item)
    elif isinstance(value, Sequence):
        for item in value:
            yield from _strings(item)
