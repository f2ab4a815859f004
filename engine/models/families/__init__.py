"""One file a model family: what sets it apart from `engine.models.decoder`. `engine.models.registry` lists them."""
