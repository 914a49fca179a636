"""Runs a trained model: a key-value cache, sampling, scores of given tokens, in any layout."""
