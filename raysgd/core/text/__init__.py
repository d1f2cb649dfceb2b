"""Output for people: HTML cards, log lines, locations in code, warnings that are shown once, and masked secrets."""
