"""Gradients that are reduced across shards exactly once."""
