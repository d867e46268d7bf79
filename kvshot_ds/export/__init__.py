"""Drafters for others: in the layouts that serving engines read, or as a folder of our own that says what it is."""
