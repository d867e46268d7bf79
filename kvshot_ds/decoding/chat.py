"""Messages -> the tokens a target is given to answer: its chat template under the options of prep.template."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2

from kvshot_ds.config.preparation import TemplateConfig
from kvshot_ds.errors import ConfigError


class Chat:
    """Renders and tokenises as the training data was: by the target's chat template or prep.template.jinja, with prep.template.system
    and prep.template.thinking. May be used by several threads.

    templated: whether there is a template at all. Raises ConfigError if prep.template.jinja cannot be read.
    """

    def __init__(self, tokenizer: Any, template: TemplateConfig) -> None:
        self._tokenizer, self._system = tokenizer, template.system
        self._lock = threading.Lock()  # encoding changes the state of a fast tokenizer
        self._options: dict[str, Any] = {} if template.thinking is None else {"enable_thinking": template.thinking}
        if template.jinja is not None:
            path = template.jinja.expanduser()
            try:
                self._options["chat_template"] = path.read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as error:
                raise ConfigError(f"prep.template.jinja={path}: not readable as a Jinja template: {error}") from None
        self.templated = bool(self._options.get("chat_template") or tokenizer.chat_template)

    def tokens(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Tokens up to where the answer begins. Raises ValueError with the template's reason if it refuses the messages."""
        if self._system is not None and messages[0]["role"] != "system":
            messages = [{"role": "system", "content": self._system}, *messages]
        try:
            with self._lock:
                text: str = self._tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True, **self._options)
        except (jinja2.TemplateError, ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError) as error:
            raise ValueError(f"the chat template refuses them: {error}") from None
        return self.encode(text, special=False)  # a template writes its own

    def encode(self, text: str, special: bool = True) -> list[int]:
        """Tokens of a plain text, with those that the tokenizer adds at its start if `special`."""
        with self._lock:
            found: list[int] = self._tokenizer(text, add_special_tokens=special, verbose=False).input_ids
        return found
