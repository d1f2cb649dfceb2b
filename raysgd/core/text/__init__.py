"""Text for people: cards, log lines, ranks in words, one-time warnings, masked secrets."""
