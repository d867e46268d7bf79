"""Everything measured, on one page."""
