"""What the shapes of this system buy: each benchmark against a plain implementation of the same mathematics."""
