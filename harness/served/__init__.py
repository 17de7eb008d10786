"""Models that run in somebody's server: what they can be asked, what they answer, and how that is scored."""
