"""The drafters: one module each, used unchanged in training, evaluation, decoding and export."""
