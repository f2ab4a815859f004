"""What only a trained model shows: `make real`."""
