"""Speed of decoding: what a drafter gains, measured beside its alternatives, and predicted from acceptance and latencies."""
