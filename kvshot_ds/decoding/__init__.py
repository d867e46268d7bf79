"""Real speculative decoding with the drafter that was trained."""
