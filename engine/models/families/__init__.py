"""The model families, one file each, with what differs from `engine.models.decoder`. See `engine.models.registry`."""
