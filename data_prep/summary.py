"""The accounts of a preparation: what became of every record."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from kvshot_ds.files import read_json, write_json

_SHOWN = 5  # reasons of quarantine, the most frequent ones


@dataclass(frozen=True)
class SplitSummary:
    """conversations; tokens; supervised: tokens of assistant turns."""

    conversations: int = 0
    tokens: int = 0
    supervised: int = 0


@dataclass(frozen=True)
class PrepSummary:
    """Counts of one preparation. records (read from the sources) + synthesised = kept + duplicates + all of dropped + quarantined + beyond.

    duplicates: exact ones. dropped: by rule. beyond: more than max_conversations or the mixture asks for. over_long: of the
    quarantined, those without an answer within max_length. failed: of the quarantined, those that an endpoint would not answer.
    mended: conversations changed, by rule (of those that came through cleaning, later duplicates included). unusable_prompts:
    written by the target and thrown away before they counted, by reason. cut: conversations cut at max_length. turns_left_out:
    assistant turns that the chat template rewrites, which teach nothing. generated: tokens the target wrote as answers.
    seconds: of this run.
    """

    records: int
    synthesised: int
    kept: int
    duplicates: int
    quarantined: int
    dropped: dict[str, int]
    beyond: int
    over_long: int
    failed: int
    mended: dict[str, int]
    unusable_prompts: dict[str, int]
    cut: int
    turns_left_out: int
    generated: int
    train: SplitSummary
    heldout: SplitSummary
    seconds: float
    reasons: dict[str, int] = field(default_factory=dict)

    @property
    def left_out(self) -> int:
        """Records and prompts that are not in the prepared files."""
        return self.duplicates + sum(self.dropped.values()) + self.quarantined + self.beyond

    def store(self, path: Path) -> None:
        write_json(path, {"status": "complete", **asdict(self)})

    @classmethod
    def load(cls, path: Path) -> PrepSummary:
        value = read_json(path)
        del value["status"]
        return cls(**{**value, "train": SplitSummary(**value["train"]), "heldout": SplitSummary(**value["heldout"])})


def report(found: PrepSummary, folder: Path) -> PrepSummary:
    """Prints the summary as a table and returns it."""
    changes = ", ".join(f"{count:,} by {rule}" for rule, count in found.mended.items())
    rows: list[tuple[str, int | str, str]] = [("records read", found.records, f"mended: {changes}" if changes else "")]
    if found.synthesised or found.unusable_prompts:
        thrown = ", ".join(f"{count:,} {reason}" for reason, count in found.unusable_prompts.items())
        rows.append(("prompts written by the target", found.synthesised, f"thrown away: {thrown}" if thrown else ""))
    rows += [("kept", found.kept, "")]
    rows += [(f"dropped: {rule}", count, "") for rule, count in {"exact_duplicates": found.duplicates, **found.dropped}.items() if count]
    rows += [("beyond max_conversations or the mixture", found.beyond, "")] if found.beyond else []
    parts = [f"{count:,} {what}" for what, count in (("over-long", found.over_long), ("not answered by the server", found.failed)) if count]
    rows += [("quarantined", found.quarantined, f"{', '.join(parts)}" if parts else "")]
    rows += [("cut at max_length", found.cut, "of those kept")] if found.cut else []
    rows += [("turns not supervised", found.turns_left_out, "the chat template rewrites them once they are history")] if found.turns_left_out else []
    for name, split in (("train", found.train), ("heldout", found.heldout)):
        rows.append((name, split.conversations, f"{split.tokens:,} tokens, {split.supervised:,} of them supervised"))
    rows += [("answer tokens written", found.generated, "")] if found.generated else []
    print("\n".join(_aligned(rows)))
    if not found.heldout.conversations:
        print("prep: nothing is held out, so kvshot eval and decode will have nothing to measure on; prepare more, or raise prep.heldout_fraction")
    for reason, count in list(found.reasons.items())[:_SHOWN]:
        print(f"prep: quarantined {count:,} x {reason}")
    if len(found.reasons) > _SHOWN:
        print("prep: and others for other reasons")
    if found.left_out > found.beyond:
        print(f"prep: each with file, line and reason in {folder / 'quarantine.jsonl'} and dropped.jsonl")
    print(f"prep: {found.seconds:.0f} s, in {folder}")
    return found


def _aligned(rows: list[tuple[str, Any, str]]) -> list[str]:
    cells = [(what, f"{count:,}" if isinstance(count, int) else count, note) for what, count, note in rows]
    first, second = (max(len(row[i]) for row in cells) for i in (0, 1))
    return [f"prep: {what:<{first}}  {count:>{second}}  {note}".rstrip() for what, count, note in cells]
