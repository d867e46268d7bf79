"""What is optimised: alignment of rows, the test-time-training unroll, losses."""
