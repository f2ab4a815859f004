"""The terminal: stdin reads text, show prints outputs, stdout survives a full disk and a reader that went away."""
