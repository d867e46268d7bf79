"""A request -> the tokens the target is given, and the room for its answer."""

from __future__ import annotations

import threading
from typing import Any

import jinja2

from kvshot_ds.config.preparation import TemplateConfig
from kvshot_ds.errors import ConfigError
from kvshot_ds.serve.protocol import ApiError, Wanted, bad

_PLAIN_TOKENS = 16  # of a completion that says nothing about max_tokens, as OpenAI has it


class Prompts:
    """Renders and tokenises requests as the training data was: by the target's chat template or prep.template.jinja, with
    prep.template.system and prep.template.thinking. May be used by several threads.

    vocab: V of the target. Raises ConfigError if prep.template.jinja cannot be read.
    """

    def __init__(self, tokenizer: Any, template: TemplateConfig, vocab: int) -> None:
        self._tokenizer, self._vocab, self._system = tokenizer, vocab, template.system
        self._lock = threading.Lock()  # encoding changes the state of a fast tokenizer
        self._options: dict[str, Any] = {} if template.thinking is None else {"enable_thinking": template.thinking}
        if template.jinja is not None:
            path = template.jinja.expanduser()
            try:
                self._options["chat_template"] = path.read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as error:
                raise ConfigError(f"prep.template.jinja={path}: not readable as a Jinja template: {error}") from None
        self.chats = bool(self._options.get("chat_template") or tokenizer.chat_template)

    def tokens(self, wanted: Wanted) -> list[int]:
        """Tokens of the prompt, at least one. Raises ApiError 400."""
        if wanted.messages is not None:
            found = self._encode(self._render(wanted.messages), special=False)  # a template writes its own
        elif isinstance(wanted.prompt, str):
            found = self._encode(wanted.prompt, special=True)
        else:
            found = list(wanted.prompt or ())
            if wrong := [token for token in found if not 0 <= token < self._vocab]:
                raise bad(f"prompt: token {wrong[0]} does not exist; the target has 0 to {self._vocab - 1}", "prompt")
        if not found:
            raise bad("the prompt is empty; expected at least one token", "messages" if wanted.chat else "prompt")
        return found

    def _render(self, messages: tuple[dict[str, str], ...]) -> str:
        if not self.chats:
            raise bad("the target has no chat template; use /v1/completions, or start the server with prep.template.jinja=FILE", "messages")
        if self._system is not None and messages[0]["role"] != "system":
            messages = ({"role": "system", "content": self._system}, *messages)
        try:
            with self._lock:
                text: str = self._tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True, **self._options)
        except (jinja2.TemplateError, ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError) as error:
            raise bad(f"messages: the chat template refuses them: {error}", "messages") from None
        return text

    def _encode(self, text: str, special: bool) -> list[int]:
        with self._lock:
            found: list[int] = self._tokenizer(text, add_special_tokens=special, verbose=False).input_ids
        return found


def room(prompt: int, wanted: Wanted, most: int, context: int) -> int:
    """New tokens that the answer to a prompt of `prompt` tokens may have.

    Those asked for; without a wish, `most` of a chat and 16 of a completion, as far as the context reaches. most: serve.max_new_tokens;
    context: of the target. Raises ApiError 400.
    """
    asked = wanted.max_tokens
    if asked is not None and asked > most:
        raise bad(f"max_tokens={asked}: this server gives at most {most} (serve.max_new_tokens)", "max_tokens")
    if prompt + (asked or 1) > context:
        found = f"the prompt has {prompt} tokens and {'the answer at least 1' if asked is None else f'max_tokens={asked}'}"
        raise ApiError(400, f"{found}; the target's context holds {context}", "messages" if wanted.chat else "prompt", "context_length_exceeded")
    return asked or min(most, context - prompt, most if wanted.chat else _PLAIN_TOKENS)
