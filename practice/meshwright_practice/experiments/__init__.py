"""Experiments of cards: each runs parts of the trainer on local ranks and returns what it measured."""
