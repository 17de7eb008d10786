"""The EXL3 format: decode, checkpoint reader, and transformers integration (registered by this import)."""

from harness.exl3 import hf as hf
