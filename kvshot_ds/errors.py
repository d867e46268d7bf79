"""The two kinds of failure a user can cause. The CLI prints their text without a traceback and exits 2 (75 if the same command goes on from there)."""


class KvshotError(Exception):
    """Something the user can mend: the text says what was expected, what was found, where, and what to do.

    told: another rank of the same run has said it already.
    """

    told = False


class ConfigError(KvshotError):
    """A recipe or an override that contradicts itself, the target or the data."""


class Preempted(KvshotError):
    """A run that was asked to stop and left a state that resumes. The CLI exits with STATUS, which a scheduler takes as: queue it again."""

    STATUS = 75  # EX_TEMPFAIL of sysexits.h
