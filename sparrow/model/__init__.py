"""The nouns and their rules: names, messages, topics, subscriptions, limits, errors."""
