"""From conversations to feature shards."""
