"""A small OpenAI-compatible HTTP server over the decoding engine, for trying a drafter by hand."""
