"""Everything this package says to a server: tables, administrative statements, and the statements of the hot path."""
