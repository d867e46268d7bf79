"""The feature contract: what is captured from the target, how it is named, stored and read back."""
