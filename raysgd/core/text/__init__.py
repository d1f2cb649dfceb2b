"""Output for people: HTML cards, log lines, lists of ranks, one-time warnings, and masked secrets."""
