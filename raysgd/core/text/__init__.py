"""Output for people: HTML cards, log lines, lists of ranks, warnings that are shown once, and masked secrets."""
