"""Loads this model in a process that has not imported lssar.hf (trust_remote_code=True)."""

import lssar.hf  # pip install 'lssar[hf]'
from lssar.hf.config import LssarConfig
from lssar.hf.model import LssarForCausalLM

__all__ = ["LssarConfig", "LssarForCausalLM"]
