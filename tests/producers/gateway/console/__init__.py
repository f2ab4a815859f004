"""The console, in Chromium."""
