"""Text from a trained model. It knows no training and no network."""
