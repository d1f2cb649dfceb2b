"""Text for people: cards, log lines, lists of ranks, one-time warnings, and masked secrets."""
