"""The commands of `lssar`: dataclasses whose fields are flags, each with a `run`."""
