"""A request -> the tokens the target is given, and the room for its answer."""

from __future__ import annotations

from typing import Any

from kvshot_ds.config.preparation import TemplateConfig
from kvshot_ds.decoding.chat import Chat
from kvshot_ds.serve.protocol import ApiError, Wanted, bad

_PLAIN_TOKENS = 16  # of a completion that says nothing about max_tokens, as OpenAI has it


class Prompts:
    """Tokens of requests, as `Chat` makes them. vocab: V of the target. Raises ConfigError if prep.template.jinja cannot be read."""

    def __init__(self, tokenizer: Any, template: TemplateConfig, vocab: int) -> None:
        self._chat, self._vocab = Chat(tokenizer, template), vocab
        self.chats = self._chat.templated

    def tokens(self, wanted: Wanted) -> list[int]:
        """Tokens of the prompt, at least one. Raises ApiError 400."""
        if wanted.messages is not None:
            found = self._rendered(wanted.messages)
        elif isinstance(wanted.prompt, str):
            found = self._chat.encode(wanted.prompt)
        else:
            found = list(wanted.prompt or ())
            if wrong := [token for token in found if not 0 <= token < self._vocab]:
                raise bad(f"prompt: token {wrong[0]} does not exist; the target has 0 to {self._vocab - 1}", "prompt")
        if not found:
            raise bad("the prompt is empty; expected at least one token", "messages" if wanted.chat else "prompt")
        return found

    def _rendered(self, messages: tuple[dict[str, str], ...]) -> list[int]:
        if not self.chats:
            raise bad("the target has no chat template; use /v1/completions, or start the server with prep.template.jinja=FILE", "messages")
        try:
            return self._chat.tokens(messages)
        except ValueError as error:
            raise bad(f"messages: {error}", "messages") from None


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
