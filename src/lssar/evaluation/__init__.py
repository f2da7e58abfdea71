"""Evaluation: loss by length and position, and what attention rows look like."""
