"""Text for people: cards, log lines, ranks in words, warnings said once, secrets masked."""
