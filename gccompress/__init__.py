"""Global cross-layer compression of transformer language models."""

from gccompress.registration import register_when_needed

__version__ = "0.1.0"

register_when_needed()
