"""The EXL3 format: decode, checkpoint reader, and transformers integration (registered by importing `hf`)."""
