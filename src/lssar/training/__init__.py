"""Training: recipes, the loop, checkpoints and metrics."""

from lssar.training.loop import train
from lssar.training.recipes import RECIPES, Recipe, recipe

__all__ = ["RECIPES", "Recipe", "recipe", "train"]
