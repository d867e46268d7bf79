"""From batches to a trained drafter."""
