"""The two kinds of failure a user can cause. The CLI prints their text without a traceback and exits 2."""


class KvshotError(Exception):
    """Something the user can mend: the text says what was expected, what was found, where, and what to do."""


class ConfigError(KvshotError):
    """A recipe or an override that contradicts itself, the target or the data."""
