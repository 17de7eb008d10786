"""What an artifact is, counted and compared: manifests, sources, provenance, what a card states, who can load it."""
